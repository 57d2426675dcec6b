"""Times the Triton kernels of vllm-fl-flaggems on a GPU beside what else computes the same.

    python -m benchmarks.kernels [--quick] [--only rms_norm rotary_embedding] [--out FILE.json]
    python -m benchmarks.kernels --sweep [--only ...] [--shape 1x8x2x4096x14336]

Run from the top of the repository, with the wheels installed. Candidates: ours, vLLM's kernels,
Inductor's compilation of the plain formula (reference wheel), flag_gems. Each is first compared
with a float64 result. A time is the median of seven replays of a CUDA graph that calls the
candidate over rotating buffers, allocation of outputs included; replays of all candidates
alternate. GB/s is the least traffic (inputs once, outputs once) over the time. A candidate that is
missing or fails is listed with the reason. bf16 throughout.

``--sweep`` times every tile that ``vllm_fl_flaggems.tiles`` offers beside the one it chooses.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.e2e.results import without_folders
from benchmarks.kernels.comparison import compare, summary, table
from benchmarks.kernels.operator import OURS, Operator, Shape
from benchmarks.kernels.operators import OPERATORS
from benchmarks.kernels.sweeping import compile_all, sweep, sweep_lines
from benchmarks.kernels.timing import copy_rate

PACKAGES = ("torch", "triton", "vllm", "flag-gems", "vllm-fl-flaggems")


def facts() -> dict[str, Any]:
    """Return what a reader needs to know about the run."""

    def installed(distribution: str) -> str | None:
        try:
            return version(distribution)
        except PackageNotFoundError:
            return None

    return {
        "command": " ".join(["python -m benchmarks.kernels", *without_folders(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: installed(name) for name in PACKAGES},
    }


def parse_shape(text: str) -> Shape:
    """Parse sizes as the table shows them: 1x8x2x4096x14336."""
    return tuple(map(int, text.split("x")))


def pick(operator: Operator, quick: bool, asked: Sequence[Shape] | None) -> Sequence[Shape]:
    """Return the shapes to run: those asked for, all, or the first, the second and the last."""
    if asked is not None:
        return [shape for shape in operator.shapes if tuple(shape) in asked]
    return [*operator.shapes[:2], operator.shapes[-1]] if quick else operator.shapes


def run_sweep(jobs: Sequence[tuple[str, Shape]], save: Any) -> None:
    """Compile every tile, then time those of each shape."""
    jobs = [(name, shape) for name, shape in jobs if OPERATORS[name].sweep is not None]
    tiles = [(n, s, tile) for n, s in jobs for tile in OPERATORS[n].sweep.rivals(s)]  # type: ignore[union-attr]
    # The first axis counts rows: it changes no compiled kernel but through the tile.
    kernels = {(n, s[1:], tile): (n, s, tile) for n, s, tile in reversed(tiles)}
    broken = compile_all(list(kernels.values()))
    for name, shape in jobs:
        found = sweep(
            name, shape, {tile for n, s, tile in broken if (n, s[1:]) == (name, shape[1:])}
        )
        save(found)
        print(sweep_lines(found), flush=True)


def main() -> int:
    """Run the benchmark; 1 when a result of ours is wrong or missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument("--quick", action="store_true", help="three shapes an operator")
    parser.add_argument("--shape", nargs="+", type=parse_shape, help="as in 1x8x2x4096x14336")
    parser.add_argument("--sweep", action="store_true", help="compare tiles of ours")
    parser.add_argument("--out", type=Path, help="write JSON here, after each operator")
    options = parser.parse_args()
    # Ours are ours all through: fused_experts sorts and sums by other operators.
    os.environ["VLLM_FL_PREFER"] = "flagos"

    jobs = [
        (name, shape)
        for name in options.only
        for shape in pick(OPERATORS[name], options.quick, options.shape)
    ]
    if not jobs:
        parser.error(f"--only {' '.join(options.only)} has no such --shape")
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = facts() | {"copy_gbps": copy_rate(), "rows": rows}
    print(f"{report['device']}, {report['versions']}, copy {report['copy_gbps']:.0f} GB/s")

    def save(row: dict[str, Any]) -> None:
        rows.append(row)
        if not options.sweep:
            report["summary"] = summary(rows)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")

    if options.sweep:
        run_sweep(jobs, save)
        return 0
    for name, shape in jobs:
        operator = OPERATORS[name]
        save(compare(name, operator, shape, host=shape == operator.shapes[0]))
    print(table(rows, report["copy_gbps"]))
    print(json.dumps(report["summary"]))
    return int(any(OURS not in row["us"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
