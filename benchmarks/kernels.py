"""Times the Triton kernels of vllm-fl-flaggems on a GPU beside what else computes the same.

    python benchmarks/kernels.py [--quick] [--only rms_norm rotary_embedding] [--out FILE.json]
    python benchmarks/kernels.py --sweep [--only ...]

Candidates: ours, vLLM's CUDA kernel, Inductor's compilation of the plain formula (reference wheel),
flag_gems. Each is first compared with a float64 result. A time is the median of seven replays of a
CUDA graph that calls the candidate over rotating buffers, allocation of outputs included; replays
of all candidates alternate. GB/s is the least traffic (inputs once, outputs once) over the time.
A candidate that is missing or fails is listed with the reason. bf16 throughout.

``--sweep`` times every tile that ``vllm_fl_flaggems.tiles`` offers beside the one it chooses.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import multiprocessing
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vllm_fl_flaggems import tiles
from vllm_fl_flaggems.kernels import activation as activation_kernels
from vllm_fl_flaggems.kernels import launch
from vllm_fl_flaggems.kernels import norm as norm_kernels
from vllm_fl_flaggems.kernels import rotary as rotary_kernels
from vllm_fl_flaggems.ops import activation, norm, rotary
from vllm_fl_flaggems.ops.layout import row_layout
from vllm_fl_reference.ops import activation as plain_activation
from vllm_fl_reference.ops import norm as plain_norm
from vllm_fl_reference.ops import rotary as plain_rotary

Shape = tuple[int, ...]
Inputs = tuple[Any, ...]
Call = Callable[..., Any]

OURS = "ours"
OTHERS = ("vllm", "inductor", "flag_gems")
EPSILON = 1e-6
HEAD = 128
MAX_POSITION = 40960
ROUNDS = 7
ROTATED_BYTES = 300e6  # more than the 50 MB of cache by far
GRAPH_US = 1000.0  # a graph runs about this long, so that starting it does not count
PACKAGES = ("torch", "triton", "vllm", "flag-gems", "vllm-fl-flaggems")
MIB = 1 << 20


# -- operators ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """An operator of the benchmark; another is one more entry of OPERATORS.

    Attributes:
        shapes: what it is timed on.
        make: (shape, device, seed) -> arguments of every candidate; the same for the same seed.
        oracle: arguments -> float64 results.
        traffic: shape -> bytes that must be moved at least.
        ours: arguments -> results.
        plain: the formula that Inductor compiles.
        vllm: as ours; raises if it cannot be had.
        flag_gems: as ours, given the package.
        tile: shape -> the tile chosen for it.
        rivals: shape -> tiles worth timing.
        launch: (arguments, tile) -> results.
    """

    shapes: Sequence[Shape]
    make: Callable[[Shape, str, int], Inputs]
    oracle: Call
    traffic: Callable[[Shape], int]
    ours: Call
    plain: Call
    vllm: Call
    flag_gems: Call
    tile: Callable[[Shape], Any]
    rivals: Callable[[Shape], Iterator[Any]]
    launch: Call


def random(shape: Shape, device: str, seed: int) -> Tensor:
    """Return normally distributed bf16 values."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)


def norm_inputs(residual: bool, shape: Shape, device: str, seed: int) -> Inputs:
    """Return x, residual, weight, epsilon."""
    added = random(shape, device, seed + 1000) if residual else None
    return random(shape, device, seed), added, 1 + 0.1 * random(shape[1:], device, 7), EPSILON


def norm_oracle(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> Any:
    """Return the result of rms_norm in float64."""
    total = x.double() if residual is None else x.double() + residual.double()
    out = total / (total.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()
    return out if residual is None else (out, total)


def norm_vllm(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> Any:
    """Call vLLM's CUDA kernel."""
    if residual is None:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out
    torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
    return x, residual


def norm_flag_gems(
    gems: Any, x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Any:
    """Call flag_gems."""
    if residual is None:
        return gems.rms_norm(x, [x.shape[-1]], weight, epsilon)
    return gems.fused_add_rms_norm(x, residual, [x.shape[-1]], weight, epsilon)


def norm_launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, tile: tiles.NormTile
) -> Any:
    """Launch our kernel with a given tile."""
    if residual is None:
        out = torch.empty_like(x)
        norm_kernels.rms_norm(out, x, weight, row_layout(x), epsilon, False, tile)
        return out
    layouts = (*row_layout(x), *row_layout(residual))
    norm_kernels.add_rms_norm(None, x, residual, weight, layouts, epsilon, False, tile)
    return x, residual


def rms_norm(residual: bool) -> Operator:
    """Return rms_norm with or without a residual."""
    return Operator(
        shapes=[(1, 4096), (64, 4096), (256, 2048), (2048, 4096), (8192, 4096), (8192, 8192)],
        make=partial(norm_inputs, residual),
        oracle=norm_oracle,
        traffic=lambda shape: 2 * math.prod(shape) * (4 if residual else 2),
        ours=norm.rms_norm,
        plain=plain_norm.rms_norm,
        vllm=norm_vllm,
        flag_gems=norm_flag_gems,
        tile=lambda shape: tiles.norm_tile(shape[1]),
        rivals=lambda shape: tiles.norm_rivals(shape[1]),
        launch=norm_launch,
    )


def silu_inputs(shape: Shape, device: str, seed: int) -> Inputs:
    """Return x."""
    return (random((shape[0], 2 * shape[1]), device, seed),)


def silu_oracle(x: Tensor) -> Tensor:
    """Return the result of silu_and_mul in float64."""
    gate, up = x.double().chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_vllm(x: Tensor) -> Tensor:
    """Call vLLM's CUDA kernel."""
    out = x.new_empty((x.shape[0], x.shape[1] // 2))
    torch.ops._C.silu_and_mul(out, x)
    return out


def silu_flag_gems(gems: Any, x: Tensor) -> Tensor:
    """Call flag_gems, which takes the halves."""
    return gems.silu_and_mul(*x.chunk(2, dim=-1))


def silu_launch(x: Tensor, tile: tiles.ActivationTile) -> Tensor:
    """Launch our kernel with a given tile."""
    out = x.new_empty((x.shape[0], x.shape[1] // 2))
    activation_kernels.gated_activation(out, x, row_layout(x), "silu", tile)
    return out


SILU = Operator(
    shapes=[(1, 12288), (64, 12288), (256, 3072), (2048, 12288), (8192, 12288)],
    make=silu_inputs,
    oracle=silu_oracle,
    traffic=lambda shape: 2 * math.prod(shape) * 3,
    ours=activation.silu_and_mul,
    plain=plain_activation.silu_and_mul,
    vllm=silu_vllm,
    flag_gems=silu_flag_gems,
    tile=lambda shape: tiles.activation_tile(*shape),
    rivals=lambda shape: tiles.activation_rivals(shape[1]),
    launch=silu_launch,
)


@functools.cache
def rotary_table(device: str) -> Tensor:
    """Return cos and sin side by side, one table for all calls as in a model."""
    frequencies = torch.logspace(0, -6, HEAD // 2, base=10, device=device)
    angles = torch.arange(MAX_POSITION, device=device)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16()


def rotary_inputs(shape: Shape, device: str, seed: int) -> Inputs:
    """Return query and key as slices of a packed projection, cos, sin, positions, style."""
    tokens, heads, key_heads = shape
    packed = random((tokens, (heads + 2 * key_heads) * HEAD), device, seed)
    query, key, _ = packed.split([heads * HEAD, key_heads * HEAD, key_heads * HEAD], dim=-1)
    cos, sin = rotary_table(device).chunk(2, dim=-1)
    generator = torch.Generator(device).manual_seed(seed)
    positions = torch.randint(0, MAX_POSITION, (tokens,), generator=generator, device=device)
    return (
        query.view(tokens, heads, HEAD),
        key.view(tokens, key_heads, HEAD),
        cos,
        sin,
        positions,
        True,
    )


def rotary_oracle(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, neox: bool
) -> tuple[Tensor, Tensor]:
    """Return the rotated heads in float64."""
    wide = (query.double(), key.double(), cos.double(), sin.double())
    return plain_rotary.rotary_embedding(*wide, positions, neox)


def rotary_vllm(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, neox: bool
) -> tuple[Tensor, Tensor]:
    """Call vLLM's CUDA kernel; cos and sin are the halves of the table that it takes."""
    table = cos.as_strided((cos.shape[0], 2 * cos.shape[1]), (cos.stride(0), 1))
    torch.ops._C.rotary_embedding(
        positions, query.flatten(1), key.flatten(1), query.shape[2], table, neox
    )
    return query, key


def rotary_flag_gems(
    gems: Any,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    neox: bool,
) -> tuple[Tensor, Tensor]:
    """Call flag_gems."""
    return gems.apply_rotary_pos_emb(query, key, cos, sin, positions, not neox, True)


def rotary_launch(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    neox: bool,
    tile: tiles.RotaryTile,
) -> tuple[Tensor, Tensor]:
    """Launch our kernel with a given tile."""
    rotary_kernels.rotate_heads(None, query, key, cos, sin, positions, neox, tile)
    return query, key


ROTARY = Operator(
    shapes=[(1, 32, 8), (64, 32, 8), (2048, 32, 8), (8192, 32, 8)],
    make=rotary_inputs,
    oracle=rotary_oracle,
    traffic=lambda shape: 2 * shape[0] * (shape[1] + shape[2]) * HEAD * 2,
    ours=rotary.rotary_embedding,
    plain=plain_rotary.rotary_embedding,
    vllm=rotary_vllm,
    flag_gems=rotary_flag_gems,
    tile=lambda shape: tiles.rotary_tile(shape[0] * (shape[1] + shape[2]), HEAD // 2),
    rivals=lambda shape: tiles.rotary_rivals(HEAD // 2),
    launch=rotary_launch,
)

OPERATORS: dict[str, Operator] = {
    "rms_norm": rms_norm(residual=False),
    "fused_add_rms_norm": rms_norm(residual=True),
    "silu_and_mul": SILU,
    "rotary_embedding": ROTARY,
}


# -- candidates -----------------------------------------------------------------------------------


def load_vllm() -> str:
    """Load vLLM's CUDA kernels; return why they cannot be had, or ""."""
    problems = []
    for module in ("vllm._custom_ops", "vllm._C", "vllm._C_stable_libtorch"):
        try:
            importlib.import_module(module)
        except Exception as error:
            problems.append(f"{module}: {type(error).__name__}: {error}")
    wanted = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding")
    absent = [name for name in wanted if not hasattr(torch.ops._C, name)]
    if not absent:
        return ""
    return f"torch.ops._C lacks {', '.join(absent)} ({'; '.join(problems) or 'modules load'})"


def load_flag_gems() -> tuple[Any, str]:
    """Return flag_gems, or None and why it cannot be had."""
    try:
        return importlib.import_module("flag_gems"), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


class Candidates:
    """What is timed beside ours.

    Attributes:
        missing: candidate -> why it is not there at all.
    """

    def __init__(self) -> None:
        self._gems, gems_problem = load_flag_gems()
        problems = {"vllm": load_vllm(), "flag_gems": gems_problem}
        self.missing = {name: why for name, why in problems.items() if why}

    def of(self, operator: Operator) -> dict[str, Call]:
        """Return candidate -> function, Inductor's compiled anew for the next shape."""
        torch.compiler.reset()
        calls = {
            OURS: operator.ours,
            "vllm": operator.vllm,
            "inductor": torch.compile(operator.plain, dynamic=False, fullgraph=True),
            "flag_gems": partial(operator.flag_gems, self._gems),
        }
        return {name: call for name, call in calls.items() if name not in self.missing}


def as_results(returned: Any) -> tuple[Tensor, ...]:
    """Return the results as a tuple."""
    return returned if isinstance(returned, tuple) else (returned,)


def error_of(returned: Any, expected: Any) -> tuple[float, bool]:
    """Return the relative error (norms) and whether it is acceptable for bf16, element by element.

    Three roundings of half a unit (2^-9) each are at most 2^-7 of the largest term, for which an
    element's own size and the typical one stand in where terms cancel.
    """
    worst, right = 0.0, True
    for out, wanted in zip(as_results(returned), as_results(expected), strict=True):
        difference = (out.double() - wanted).abs()
        typical = wanted.square().mean().sqrt()
        relative = float(difference.square().mean().sqrt() / typical)
        bound = 2**-6 * (wanted.abs() + typical)
        worst = max(worst, relative)
        right = right and relative < 5e-3 and bool((difference <= bound).all())
    return worst, right


# -- timing ---------------------------------------------------------------------------------------


@dataclass
class Timed:
    """A candidate on a shape.

    Attributes:
        graph: the captured calls.
        calls: their number.
        times: microseconds a call, one entry a round.
        kept: the results that the graph writes to.
    """

    graph: torch.cuda.CUDAGraph
    calls: int
    times: list[float] = field(default_factory=list)
    kept: deque[Any] = field(default_factory=deque)

    def replay(self) -> None:
        """Run once and remember the time."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.times.append(start.elapsed_time(end) * 1000 / self.calls)

    @property
    def us(self) -> float:
        """The median."""
        return statistics.median(self.times)


def buffers(operator: Operator, shape: Shape) -> list[Inputs]:
    """Return the input sets that a graph rotates over."""
    sets = math.ceil(ROTATED_BYTES / operator.traffic(shape))
    return [operator.make(shape, "cuda", seed) for seed in range(max(4, min(64, sets)))]


def capture(call: Call, sets: list[Inputs], traffic: int) -> Timed:
    """Capture calls over rotating buffers; as many results as sets stay alive."""
    expected_us = 1.5 + traffic / 4e6
    rotations = math.ceil(max(1.0, min(GRAPH_US / expected_us, 512) / len(sets)))
    for inputs in sets[:2]:
        call(*inputs)
    torch.cuda.synchronize()
    timed = Timed(torch.cuda.CUDAGraph(), rotations * len(sets))
    timed.kept = deque(maxlen=len(sets))
    with torch.cuda.graph(timed.graph):
        for _ in range(rotations):
            for inputs in sets:
                timed.kept.append(call(*inputs))
    timed.graph.replay()
    torch.cuda.synchronize()
    return timed


def run_rounds(candidates: Sequence[Timed]) -> None:
    """Replay all candidates in turn."""
    for timed in candidates:  # the clock rises before anything counts
        timed.graph.replay()
    for _ in range(ROUNDS):
        for timed in candidates:
            timed.replay()


def host_us(call: Call, inputs: Inputs) -> float:
    """Return the microseconds that the host needs for an eager call, the queue not being full."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            call(*inputs)
        times.append((time.perf_counter() - start) * 1e4)
    torch.cuda.synchronize()
    return statistics.median(times)


def copy_rate() -> float:
    """Return GB/s at which a kernel reads and writes memory, both counted."""
    size = 1024 * MIB
    pairs = [tuple(torch.randn(size // 4, device="cuda") for _ in "ab") for _ in "ab"]
    # A kernel that reads and writes: a captured copy_ is the slower work of a copy engine.
    timed = capture(lambda source, target: torch.neg(source, out=target), pairs, 2 * size)
    run_rounds([timed])
    return 2 * size / timed.us / 1000


# -- comparison -----------------------------------------------------------------------------------


def compare(name: str, shape: Shape, candidates: Candidates, host: bool) -> dict[str, Any]:
    """Check and time every candidate of an operator on a shape."""
    operator = OPERATORS[name]
    sets = buffers(operator, shape)
    fresh = partial(operator.make, shape, "cuda", 0)
    expected = operator.oracle(*fresh())
    row: dict[str, Any] = {"op": name, "shape": shape, "us": {}, "error": {}, "host_us": {}}
    row["problems"] = {}
    timed: dict[str, Timed] = {}
    for candidate, call in candidates.of(operator).items():
        try:
            error, right = error_of(call(*fresh()), expected)
            row["error"][candidate] = error
            if not right:
                row["problems"][candidate] = f"wrong result, relative error {error:.1e}"
                continue
            timed[candidate] = capture(call, sets, operator.traffic(shape))
            if host:
                row["host_us"][candidate] = host_us(call, fresh())
        except Exception as problem:
            text = (str(problem).splitlines() or [""])[0]
            row["problems"][candidate] = f"{type(problem).__name__}: {text[:300]}"
    run_rounds(list(timed.values()))
    row["us"] = {candidate: found.us for candidate, found in timed.items()}
    row["spread"] = {c: (max(t.times) - min(t.times)) / t.us for c, t in timed.items()}
    row["gbps"] = {c: operator.traffic(shape) / us / 1000 for c, us in row["us"].items()}
    others = [us for candidate, us in row["us"].items() if candidate != OURS]
    row["ratio"] = row["us"][OURS] / min(others) if others and OURS in row["us"] else None
    return row


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the geometric mean of the ratios, in all and by operator, and the shapes behind."""
    ratios = [(row["op"], row["ratio"]) for row in rows if row["ratio"] is not None]

    def mean(values: list[float]) -> float | None:
        return math.exp(statistics.fmean(map(math.log, values))) if values else None

    return {
        "geometric_mean": mean([ratio for _, ratio in ratios]),
        "by_op": {op: mean([r for o, r in ratios if o == op]) for op in dict(ratios)},
        "slower_than_1.05": [
            [row["op"], row["shape"], row["ratio"]] for row in rows if (row["ratio"] or 0) > 1.05
        ],
    }


def table(rows: Sequence[dict[str, Any]], copy: float) -> str:
    """Return the rows as text."""
    head = f"{'op':<20}{'shape':<16}"
    head += "".join(f"{name:>11}" for name in (OURS, *OTHERS))
    lines = [f"{head}{'ratio':>8}{'GB/s':>8}{'of copy':>9}"]
    for row in rows:
        line = f"{row['op']:<20}{'x'.join(map(str, row['shape'])):<16}"
        line += "".join(
            f"{us:>11.2f}" if us else f"{'-':>11}" for us in map(row["us"].get, (OURS, *OTHERS))
        )
        rate = row["gbps"].get(OURS, 0.0)
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append(f"{line}{ratio:>8}{rate:>8.0f}{rate / copy:>9.1%}")
    for row in rows:
        if row["host_us"]:
            costs = ", ".join(f"{name} {us:.1f}" for name, us in row["host_us"].items())
            lines.append(f"host us an eager call, {row['op']} {row['shape']}: {costs}")
    for row in rows:
        lines += [f"{row['op']} {row['shape']} {c}: {why}" for c, why in row["problems"].items()]
    return "\n".join(lines)


# -- sweep ----------------------------------------------------------------------------------------


@contextmanager
def without_overlap() -> Iterator[None]:
    """Launch as if kernels could not overlap."""
    options = launch.launch_options()
    before = dict(options)
    options.clear()
    options["OVERLAP"] = False
    yield
    options.clear()
    options.update(before)


def compile_tile(name: str, shape: Shape, tile: Any) -> str:
    """Run once, so that the compiled kernel is in Triton's cache on disk; return what fails."""
    operator = OPERATORS[name]
    try:
        operator.launch(*operator.make(shape, "cuda", 0), tile=tile)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compile_all(jobs: Sequence[tuple[str, Shape, Any]]) -> list[str]:
    """Compile in several processes; return what fails of each job."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=12, mp_context=context) as pool:
        return list(pool.map(compile_tile, *zip(*jobs, strict=True)))


def sweep(name: str, shape: Shape, broken: set[Any]) -> dict[str, Any]:
    """Time every tile on a shape but the broken ones; the chosen one also without overlap."""
    operator = OPERATORS[name]
    sets = buffers(operator, shape)
    fresh = partial(operator.make, shape, "cuda", 0)
    expected = operator.oracle(*fresh())
    chosen = operator.tile(shape)
    timed: dict[Any, Timed] = {}
    for tile in dict.fromkeys([chosen, *operator.rivals(shape)]):
        if tile in broken:
            continue
        call = partial(operator.launch, tile=tile)
        error, right = error_of(call(*fresh()), expected)
        if not right:
            raise AssertionError(f"{name} {shape} {tile}: wrong result, relative error {error:.1e}")
        timed[tile] = capture(call, sets, operator.traffic(shape))
    with without_overlap():
        plain = capture(partial(operator.launch, tile=chosen), sets, operator.traffic(shape))
    run_rounds([*timed.values(), plain])
    order = sorted(timed, key=lambda tile: timed[tile].us)
    return {
        "op": name,
        "shape": shape,
        "chosen": str(chosen),
        "chosen_us": timed[chosen].us,
        "chosen_without_overlap_us": plain.us,
        "tiles": {str(tile): timed[tile].us for tile in order},
    }


def sweep_lines(found: dict[str, Any]) -> str:
    """Return the best tiles of a shape as text."""
    best = list(found["tiles"].items())[:4]
    lines = [
        f"{found['op']} {found['shape']}: chosen {found['chosen_us']:.2f} us "
        f"({found['chosen_us'] / best[0][1]:.3f} of the best), "
        f"{found['chosen_without_overlap_us']:.2f} without overlap; {found['chosen']}"
    ]
    return "\n".join(lines + [f"    {us:8.2f}  {tile}" for tile, us in best])


# -- command line ---------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """Return what a reader needs to know about the run."""

    def installed(distribution: str) -> str | None:
        try:
            return version(distribution)
        except PackageNotFoundError:
            return None

    return {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: installed(name) for name in PACKAGES},
    }


def pick(operator: Operator, quick: bool) -> Sequence[Shape]:
    """Return the shapes to run: all, or the first, the second and the last."""
    return [*operator.shapes[:2], operator.shapes[-1]] if quick else operator.shapes


def main() -> int:
    """Run the benchmark; 1 when a result of ours is wrong or missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument("--quick", action="store_true", help="three shapes an operator")
    parser.add_argument("--sweep", action="store_true", help="compare tiles of ours")
    parser.add_argument("--out", type=Path, help="write JSON here, after each operator")
    options = parser.parse_args()

    report: dict[str, Any] = facts()
    rows: list[dict[str, Any]] = []
    report["copy_gbps"] = copy_rate()
    print(f"{report['device']}, {report['versions']}, copy {report['copy_gbps']:.0f} GB/s")

    def save() -> None:
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")

    jobs = [
        (name, shape) for name in options.only for shape in pick(OPERATORS[name], options.quick)
    ]
    if options.sweep:
        report["sweep"] = rows
        widths = {(name, *shape[1:]): (name, shape) for name, shape in reversed(jobs)}
        every = [(n, s, tile) for n, s in widths.values() for tile in OPERATORS[n].rivals(s)]
        start = time.perf_counter()
        failures = compile_all(every)
        print(f"compiled {len(every)} kernels in {time.perf_counter() - start:.0f} s")
        broken = {(n, tile) for (n, _, tile), why in zip(every, failures, strict=True) if why}
        for why in filter(None, failures):
            print(f"left out: {why}")
        for name, shape in jobs:
            rows.append(sweep(name, shape, {tile for n, tile in broken if n == name}))
            print(sweep_lines(rows[-1]), flush=True)
            save()
        return 0

    candidates = Candidates()
    for name, why in candidates.missing.items():
        print(f"not timed: {name}: {why}")
    report |= {"missing": candidates.missing, "rows": rows}
    for name, shape in jobs:
        rows.append(compare(name, shape, candidates, host=shape == OPERATORS[name].shapes[0]))
        report["summary"] = summary(rows)
        save()
    print(table(rows, report["copy_gbps"]))
    print(json.dumps(report["summary"]))
    return int(any(OURS not in row["us"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
