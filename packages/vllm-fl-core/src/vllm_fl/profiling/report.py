"""From what the workers recorded to shares by origin, by operation and by kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.profiling.classify import Kernel, classify
from vllm_fl.profiling.workload import Phase

Patterns = Mapping[str, tuple[str, str]]


def unit(device_type: str) -> str:
    """Return what is counted on a device of torch's type ``device_type``."""
    return "CPU time" if device_type == "cpu" else "device time"


def summarise(phases: Mapping[str, Phase], patterns: Patterns) -> dict[str, Any]:
    """Return phase -> its shares, and "all" for the phases together. Times are of all workers.

    Raises:
        ConfigError: the profiler recorded no time at all.
    """
    records = {name: phase.records for name, phase in phases.items()}
    records["all"] = [record for phase in phases.values() for record in phase.records]
    shares = {name: _shares(recorded, patterns) for name, recorded in records.items()}
    if not shares["all"]["us"]:
        raise ConfigError(
            "torch.profiler recorded no time on the device: this torch cannot profile it, or "
            "another profiler is at work."
        )
    steps = {name: phase.steps for name, phase in phases.items()}
    seconds = {name: phase.seconds for name, phase in phases.items()}
    steps["all"], seconds["all"] = sum(steps.values()), sum(seconds.values())
    return {
        name: {"steps": steps[name], "seconds": seconds[name], **found}
        for name, found in shares.items()
    }


def _shares(records: Iterable[dict[str, Any]], patterns: Patterns) -> dict[str, Any]:
    kernels: dict[str, list[Any]] = {}
    for record in records:
        for name, calls, spent in record["kernels"]:
            kind = classify(name, patterns, record["triton"])
            row = kernels.setdefault(name, [kind, 0, 0.0])
            row[1] += calls
            row[2] += spent
    total = sum(spent for _, _, spent in kernels.values())
    origins: dict[Any, list[Any]] = defaultdict(lambda: [0, 0.0])
    operations: dict[Any, list[Any]] = defaultdict(lambda: [0, 0.0])
    for kind, calls, spent in kernels.values():
        for key, groups in ((kind.origin, origins), ((kind.op, kind.origin), operations)):
            groups[key][0] += calls
            groups[key][1] += spent
    triton = sum(spent for kind, _, spent in kernels.values() if kind.triton)

    def entry(calls: int, spent: float) -> dict[str, Any]:
        return {"calls": calls, "us": spent, "share": spent / total if total else 0.0}

    def ordered(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(rows, key=lambda row: -row["us"])

    def described(name: str, kind: Kernel) -> dict[str, Any]:
        return {"kernel": name, "op": kind.op, "origin": kind.origin, "triton": kind.triton}

    return {
        "us": total,
        "triton_share": triton / total if total else 0.0,
        "origins": ordered({"origin": o, **entry(*row)} for o, row in origins.items()),
        "operations": ordered(
            {"op": op, "origin": origin, **entry(*row)} for (op, origin), row in operations.items()
        ),
        "kernels": ordered(
            described(name, kind) | entry(calls, spent)
            for name, (kind, calls, spent) in kernels.items()
        ),
    }
