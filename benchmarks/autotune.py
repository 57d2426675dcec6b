"""AutoTune on a model of benchmarks/e2e: from everything on one backend to the tuned choice.

    python -m benchmarks.autotune --model qwen3-30b-a3b --layers 12 --time-budget 8m

Tunes from a mode of benchmarks/e2e, everything on flagos; vendor and reference are available. Then
benchmarks/e2e measures native vLLM, everything on flagos, everything on the vendor and the result
in turns, compiled and in CUDA graphs, on the tuned workload, and the gains of the result are
printed with their intervals. Run from the top of the repository.

What is done is kept in --folder and --out. A call ends within --time-budget; the same command goes
on from there. More arguments go to `vllm-fl autotune`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.e2e.__main__ import duration
from benchmarks.e2e.memory import device_bytes, share
from benchmarks.e2e.models import write_model
from benchmarks.e2e.modes import NATIVE, Mode
from benchmarks.e2e.process import TOP
from benchmarks.e2e.results import without_folders
from benchmarks.e2e.workloads import WORKLOADS, Workload
from vllm_fl.autotune.statistics import widest_estimate

TUNED = "tuned"
SINGLE_BACKENDS = ("flagos", "vendor")
SECONDS_TO_COMPARE = 180.0
"""Starting the engines of the comparison and its first rounds take about so long."""
GRACE = 30.0
"""Seconds after the time budget in which a tuner ends by itself, or is killed."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; what is not ours is in ``more``."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.autotune", description=description, epilog=epilog,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--model", default="qwen3-30b-a3b", help="as for benchmarks/e2e")
    add("--layers", type=int, help="cut the model to so many")
    add("--workload", type=Workload.parse, default=WORKLOADS[0], help="BATCHxPROMPTxOUTPUT")
    add("--backend", choices=SINGLE_BACKENDS, default="flagos", help="to start from")
    add("--baseline", default=NATIVE, help="of the comparison; default: native")
    add("--rounds", type=int, default=12, help="of the comparison; default: 12")
    add("--time-budget", type=duration, default=480.0, help="of this call; default: 8m")
    add("--engine", type=json.loads, default={}, help="more arguments of LLM, as JSON")
    add("--folder", type=Path, default=TOP / "build" / "autotune", help="of the study")
    add("--out", type=Path, default=TOP / "benchmarks" / "results" / "autotune.json")
    parsed, more = parser.parse_known_args(arguments)
    parsed.more = more
    return parsed


def engine_arguments(arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Return the arguments of LLM for an engine that is alone on the device."""
    config = json.loads((model / "config.json").read_text())
    _, cache = share(config, [arguments.workload], 1, device_bytes())
    return {
        # On vLLM's own random weights all tokens are alike, and wrong operators pass the check.
        "load_format": "random_normal",
        "worker_extension_cls": "benchmarks.e2e.weights.Extension",
        "kv_cache_memory_bytes": cache,
        "gpu_memory_utilization": 0.1,  # what must be free at the start, no more
        **arguments.engine,
    }


def tuning_command(arguments: argparse.Namespace, model: Path, seconds: float) -> list[str]:
    """Return the command that tunes, or goes on tuning, for so many seconds."""
    folder, shape = arguments.folder, arguments.workload
    workload = folder / f"{shape}.yaml"
    content = {"requests": shape.batch, "prompt": shape.prompt, "output": shape.output}
    workload.write_text(json.dumps({**content, "concurrency": shape.batch}))  # JSON is YAML
    study = folder / "study.db"
    return [
        sys.executable, "-m", "vllm_fl", "autotune", "--model", str(model),
        "--engine", json.dumps(engine_arguments(arguments, model)), "--workload", str(workload),
        "--out", str(folder / "tuned.yaml"),
        "--storage", f"sqlite:///{study}", "--time-budget", f"{seconds:.0f}s",
        "--trial-limit", "120s",
        "--verify-starts", "0",  # the comparison is the verification
        "--json", *(["--resume"] if study.exists() else []), *arguments.more,
    ]  # fmt: skip


def tune(arguments: argparse.Namespace, model: Path, seconds: float) -> dict[str, Any]:
    """Tune, or return what an earlier call has found.

    Raises:
        TimeoutExpired: the tuner hung; its trials are kept.
    """
    kept = arguments.folder / "found.json"
    if not kept.exists():
        paths = filter(None, (str(TOP), os.environ.get("PYTHONPATH")))
        environ = {
            **os.environ, "PYTHONPATH": os.pathsep.join(paths),
            **Mode.parse(arguments.backend, arguments.folder).environ,
        }  # fmt: skip
        done = subprocess.run(
            tuning_command(arguments, model, seconds), env=environ, stdout=subprocess.PIPE,
            text=True, check=True, timeout=seconds + GRACE,
        )  # fmt: skip
        undecided: dict[str, Any] = json.loads(done.stdout)
        if undecided["result"] is None:  # the next call goes on
            return undecided
        kept.write_text(done.stdout)
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def comparison_command(arguments: argparse.Namespace, won: bool, seconds: float) -> list[str]:
    """Return the command that compares the result with single backends and the baseline."""
    modes = list(SINGLE_BACKENDS)
    modes += [f"{TUNED}={arguments.folder / 'tuned.yaml'}"] if won else []
    layers = [] if arguments.layers is None else ["--layers", str(arguments.layers)]
    return [
        sys.executable, "-m", "benchmarks.e2e", "--model", arguments.model, *layers,
        "--baseline", arguments.baseline, *(part for mode in modes for part in ("--mode", mode)),
        "--workload", str(arguments.workload), "--rounds", str(arguments.rounds),
        "--live", str(len(modes) + 1), "--engine", json.dumps(arguments.engine),
        "--time-budget", f"{seconds:.0f}s", "--out", str(arguments.out),
    ]  # fmt: skip


def gains(records: Mapping[str, Any], workload: str) -> dict[str, dict[str, float]]:
    """Return mode -> the tuned configuration's output tokens/s over that mode's, with interval.

    Args:
        records: mode -> its record in a result of benchmarks/e2e whose engines took turns.
        workload: which one.
    """
    tuned = records[TUNED]["output_tokens_per_second"].get(workload, [])
    found = {}
    for mode, record in records.items():
        theirs = record["output_tokens_per_second"].get(workload, [])
        if mode == TUNED or not theirs or len(theirs) != len(tuned):
            continue
        over = widest_estimate([a / b for a, b in zip(tuned, theirs, strict=True)])
        found[mode] = {"value": over.value, "low": over.low, "high": over.high}
    return found


def report(result: Mapping[str, Any], workload: str) -> str:
    """Return the tuning and the comparison as text."""
    tuning, lines = result["tuning"], []
    outcome, rate = tuning["result"], tuning["rate"]
    lines.append(f"{len(tuning['trials'])} trials of {tuning['size']} configurations")
    if rate is not None:
        lines[0] += (
            f"; a minute: {rate['live']:.1f} re-bound in the live engine, "
            f"{rate['restarting']:.2f} if engines were started for each"
        )
    if outcome["winner"] is None:
        lines.append(f"everything stays as it was: {outcome['reason']}")
    else:
        lines.append(f"result: {outcome['name']}")
    for mode, over in result["gains"].items():
        lines.append(f"{workload}: {over['value']:.4f} [{over['low']:.4f}, {over['high']:.4f}] "
                     f"times as fast as {mode}")  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    """Tune, then compare; return 1 if the comparison lacks a mode, 2 if there is no time for it."""
    began = time.monotonic()
    arguments = parse_arguments()
    arguments.folder = arguments.folder.resolve()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    model = write_model(arguments.model, arguments.layers, arguments.folder)
    found = tune(arguments, model, arguments.time_budget - GRACE)
    if found["result"] is None:
        print("not decided yet; the same command goes on", file=sys.stderr)
        return 2
    won = found["result"]["winner"] is not None
    left = arguments.time_budget - (time.monotonic() - began)
    if left < SECONDS_TO_COMPARE:
        print("tuned; the same command compares the result", file=sys.stderr)
        return 2
    done = subprocess.run(
        comparison_command(arguments, won, left), cwd=TOP, check=False, timeout=left + GRACE
    )
    result = json.loads(arguments.out.read_text())
    (records,) = result["models"].values()
    result |= {"tuning": without_folders(found)}
    result |= {"gains": gains(records, str(arguments.workload)) if won else {}}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    text = report(result, str(arguments.workload))
    arguments.out.with_suffix(".txt").write_text(text + "\n")
    print(text)
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
