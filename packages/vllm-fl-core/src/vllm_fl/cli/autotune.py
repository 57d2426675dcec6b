"""``vllm-fl autotune``: find the fastest implementations for a model by measurement."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from vllm_fl.cli.outputs import check_outputs
from vllm_fl.dispatch.errors import ConfigError

DESCRIPTION = "Find the implementations of operators that make a whole model fastest."


def parse_seconds(text: str) -> float:
    """Parse ``90``, ``90s``, ``30m`` or ``2h`` into seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time like 90s, 30m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def parse_engine(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return content


def parse_count(text: str) -> int:
    """Parse a positive whole number."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, all but ``--json``, which every command has."""
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="the model, as for vLLM")
    add(
        "--workload",
        default="chat",
        metavar="FILE|PRESET",
        help="chat (the default), prefill, decode, single, smoke, or a YAML file",
    )
    add(
        "--objective",
        default="throughput",
        metavar="O",
        help="throughput (the default), latency, ttft, or weights: throughput=0.7,latency=0.3",
    )
    add("--trials", type=parse_count, default=40, metavar="N", help="at most; default: 40")
    add("--time-budget", type=parse_seconds, metavar="T", help="as in 90s, 30m, 2h")
    add(
        "--storage",
        default="sqlite:///vllm-fl-autotune.db",
        metavar="URL",
        help="where the study is kept, any URL that Optuna takes; default: %(default)s",
    )
    add("--resume", action="store_true", help="continue the study, or join those who run it")
    add("--out", type=Path, default=Path("tuned.yaml"), metavar="FILE", help="default: tuned.yaml")
    add("--report", type=Path, metavar="FILE", help="default: that of --out, with .html")
    add(
        "--engine",
        type=parse_engine,
        default={},
        metavar="JSON",
        help="more arguments of vLLM's LLM",
    )
    add(
        "--tolerance", type=float, metavar="NATS", help="allowed mean difference from the reference"
    )
    add("--keep", action="append", default=[], metavar="OP", help="leave it at its default")
    add("--trial-limit", type=parse_seconds, default=600.0, metavar="T", help="default: 600s")
    add("--verify-starts", type=int, default=2, metavar="N", help="default: 2; 0 for none")
    add("--seed", type=int, metavar="N", help="of the sampler")


def run(arguments: argparse.Namespace) -> tuple[str, int]:
    """Tune, and write the configuration file and the report; progress goes to standard error.

    Returns:
        What to print, and the exit status: 0, 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        ConfigError: an option is not allowed, or a package is missing.
        TrialFailed: the default itself cannot run.
    """
    from vllm_fl.autotune import Options, tune

    try:
        from tqdm import tqdm

        from vllm_fl.autotune import report
    except ImportError as error:
        raise ConfigError(
            f"Tuning needs more packages ({error}): pip install 'vllm-fl-core[autotune]'"
        ) from error
    from vllm_fl.autotune import result

    options = Options(
        model=arguments.model,
        workload=arguments.workload,
        objective=arguments.objective,
        trials=arguments.trials,
        seconds=arguments.time_budget,
        storage=arguments.storage,
        resume=arguments.resume,
        engine=arguments.engine,
        keep=tuple(arguments.keep),
        tolerance=arguments.tolerance,
        trial_seconds=arguments.trial_limit,
        verify_starts=arguments.verify_starts,
        seed=arguments.seed,
    )
    path = _report_path(arguments)
    check_outputs({"--out": arguments.out, "--report": path}, _used(arguments))
    with (
        _ended_by_sigterm() as signals,
        tqdm(total=arguments.trials, unit="trial", file=sys.stderr, dynamic_ncols=True) as bar,
    ):
        found = tune(options, tell=_teller(bar), progress=_shower(bar))
    path.write_text(report.html(found), encoding="utf-8")
    lines = [report.text(found), f"Report: {path}"]
    outcome = found["result"]
    if report.is_decided(found) and outcome["winner"] is not None:
        result.write(arguments.out, outcome["file"])
        use = f"VLLM_FL_CONFIG={arguments.out} uses it"
        if report.is_worse_than_platform(found):
            use = "the platform's own defaults are faster"
        lines.append(f"Written: {arguments.out} ({use})")
    elif arguments.out.exists():
        lines.append(_kept_file(arguments.out))
        if arguments.json:
            print(f"vllm-fl autotune: {lines[-1]}", file=sys.stderr)
    status = 0
    if found["interrupted"]:
        status = 128 + (signals[0] if signals else signal.SIGINT)
    return json.dumps(found, indent=2) if arguments.json else "\n".join(lines), status


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[list[int]]:
    """Let SIGTERM end the work as Ctrl-C does; yield a list that holds it once it has come.

    Only the first one counts: `timeout` sends two.
    """
    came: list[int] = []

    def end(number: int, frame: object) -> None:
        if not came:
            came.append(number)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


def _report_path(arguments: argparse.Namespace) -> Path:
    if arguments.report is not None:
        return Path(arguments.report)
    out: Path = arguments.out
    return out.with_suffix(".html") if out.name else out  # "." has no suffix, and is refused


def _kept_file(path: Path) -> str:
    """Say of an earlier tuning's file that it is there: VLLM_FL_TUNED_DIR would go on using it."""
    written = datetime.fromtimestamp(path.stat().st_mtime)
    return (
        f"Still there: {path}, written {written:%Y-%m-%d %H:%M}. This run did not confirm it; "
        "VLLM_FL_CONFIG or VLLM_FL_TUNED_DIR goes on using it until it is removed."
    )


def _used(arguments: argparse.Namespace) -> dict[str, Path]:
    """Return the files that tuning needs."""
    used = {}
    if Path(arguments.workload).is_file():
        used["--workload"] = Path(arguments.workload)
    database = re.match(r"sqlite[^:]*:///([^?]+)", arguments.storage)
    if database is not None:
        used["--storage"] = Path(database[1])
    return used


def _teller(bar: Any) -> Callable[[str], None]:
    def tell(text: str) -> None:
        if text.startswith(("confirming", "--resume")):  # what takes long, or was not expected
            bar.write(text, file=sys.stderr)
        bar.set_description(text[:60])

    return tell


def _shower(bar: Any) -> Callable[[Any], None]:
    def show(progress: Any) -> None:
        bar.total = progress.trials
        bar.n = progress.done
        parts = []
        if progress.best is not None:
            parts.append(f"best {progress.best:.3f}x: {progress.name}"[:80])
        if progress.seconds_left is not None:
            parts.append(f"{max(0, progress.seconds_left) / 60:.0f} min left")
        bar.set_postfix_str(", ".join(parts))

    return show
