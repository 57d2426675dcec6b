"""What dispatch costs, as ratios to a direct Python call of the same function in the same run.

    python benchmarks/dispatch_overhead.py [--out benchmarks/results/dispatch_overhead.json]

Each figure is the median of several rounds; the rounds of all candidates alternate. The trivial
operator returns its argument, so the ratios are the worst there can be.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_fl.dispatch import (
    BackendImplKind,
    OpImpl,
    SelectionPolicy,
    bind_op,
    call_op,
    get_default_manager,
    policy_context,
)

OP = "silu_and_mul"
CALLS, ROUNDS = 200_000, 15


def identity(x: object) -> object:
    """The trivial operator."""
    return x


def loop(call: str, **names: object) -> Callable[[], float]:
    """Return a function that times CALLS calls, written out in a loop of its own."""
    source = f"def run(n, clock, {', '.join(names)}):\n    start = clock()\n"
    source += f"    for _ in range(n):\n        {call}\n    return clock() - start\n"
    space: dict[str, Any] = {}
    exec(source, space)
    return lambda: space["run"](CALLS, time.perf_counter, **names)


def medians(candidates: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Return nanoseconds a call, the empty loop taken off."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    gc.disable()
    for _ in range(ROUNDS):
        for name, run in candidates.items():
            times[name].append(run() / CALLS * 1e9)
    gc.enable()
    values = {name: statistics.median(found) for name, found in times.items()}
    empty = values.pop("empty loop")
    return {name: value - empty for name, value in values.items()}


def register(count: int) -> None:
    """Fill the manager with implementations of the trivial operator."""
    manager = get_default_manager()
    manager.registry.register_impl(OpImpl(OP, "default.flagos", BackendImplKind.DEFAULT, identity))
    for number in range(count):
        manager.registry.register_impl(
            OpImpl(OP, f"vendor.v{number}", BackendImplKind.VENDOR, identity, vendor=f"v{number}")
        )


def in_process() -> dict[str, float]:
    """Time calls through the dispatcher."""
    register(0)
    handle = bind_op(OP)
    names = {"direct": identity, "handle": handle, "call_op": call_op}
    candidates = {
        "empty loop": loop("pass", x=1),
        "direct call": loop("direct(1)", **names),
        "bound handle, handle.fn(x)": loop("fn = handle.fn\n        fn(1)", **names),
        "bound handle, handle(x)": loop("handle(1)", **names),
        "call_op(name, x)": loop(f"call_op({OP!r}, 1)", **names),
    }
    found = medians(candidates)
    register(100)
    for number in range(100):
        with policy_context(SelectionPolicy.from_dict(deny_vendors=[f"v{number}"])):
            call_op(OP, 1)
    crowded = medians({k: candidates[k] for k in ("empty loop", "call_op(name, x)")})
    found["call_op(name, x), 101 implementations, 100 policies"] = crowded["call_op(name, x)"]
    return found


def bytes_per_bound_call() -> float:
    """Return what tracemalloc sees allocated by a bound call."""
    handle = bind_op(OP)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(1000):
        fn = handle.fn
        fn(1)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return max(0, after - before) / 1000


def process_seconds(code: str, path: str = "") -> float:
    """Return the median wall time of fresh processes that run ``code``."""
    times = []
    for _ in range(11):
        start = time.perf_counter()
        text = f"import sys; sys.path.insert(0, {path!r}); {code}"
        subprocess.run([sys.executable, "-I", "-c", text], check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


BACKEND = """
from vllm_fl.dispatch.backend import Backend
class B(Backend):
    name = vendor = {name!r}
    operators = {{"silu_and_mul": "json:loads"}}
"""
TIMED = """
import sys, time
sys.path.insert(0, {path!r})
import importlib.metadata, vllm_fl.dispatch as d
{before}
start = time.perf_counter()
{code}
print(time.perf_counter() - start)
"""


def discovery_milliseconds() -> float:
    """Return what finding and registering 50 wheels takes beyond the bare entry-point scan."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(50):
            name = f"acme{number}"
            (Path(folder) / f"{name}.py").write_text(BACKEND.format(name=name))
            info = Path(folder) / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[vllm_fl.backends]\n{name} = {name}:B\n")
        scan = "importlib.metadata.entry_points(group=d.PLUGIN_GROUP)"

        def timed(before: str, code: str) -> float:
            text = TIMED.format(path=folder, before=before, code=code)
            runs = [
                subprocess.run([sys.executable, "-c", text], check=True, capture_output=True)
                for _ in range(11)
            ]
            return statistics.median(float(run.stdout) for run in runs) * 1e3

        bare = timed("", scan)
        return timed("", "d.get_default_manager().ensure_initialized()") - bare


def main() -> None:
    """Print the table and write it with what it was measured on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    arguments = parser.parse_args()

    calls = in_process()
    direct = calls["direct call"]
    root = str(Path(sys.modules["vllm_fl"].__file__ or "").parent.parent)
    nothing = process_seconds("pass")
    yardstick = process_seconds("import json, logging, dataclasses") - nothing
    importing = process_seconds("import vllm_fl.dispatch", root) - nothing
    result = {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.processor() or 'unknown processor'}",
        "nanoseconds": {name: round(value, 1) for name, value in calls.items()},
        "ratio to a direct call": {name: round(v / direct, 2) for name, v in calls.items()},
        "bytes allocated by a bound call": bytes_per_bound_call(),
        "import vllm_fl.dispatch / import json, logging, dataclasses": round(
            importing / yardstick, 2
        ),
        "milliseconds to discover 50 wheels beyond the entry-point scan": round(
            discovery_milliseconds(), 1
        ),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
