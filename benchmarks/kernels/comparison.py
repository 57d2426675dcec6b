"""Checks every candidate of an operator, times them side by side and sums up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.kernels.operator import OURS, Operator, Shape
from benchmarks.kernels.timing import Timed, buffers, capture, host_us, run_rounds


def compare(name: str, operator: Operator, shape: Shape, host: bool) -> dict[str, Any]:
    """Return the errors, times and ratios of every candidate of an operator on a shape."""
    sets = buffers(operator, shape)
    fresh = partial(operator.make, shape, "cuda", 0)
    expected = operator.oracle(*fresh())
    row: dict[str, Any] = {"op": name, "shape": shape, "us": {}, "error": {}, "host_us": {}}
    row["problems"] = {}
    timed: dict[str, Timed] = {}
    for candidate, load in operator.candidates.items():
        try:
            call = load()
            error, right = operator.agree(call(*fresh()), expected)
            row["error"][candidate] = error
            if not right:
                row["problems"][candidate] = f"wrong result, error {error:.1e}"
                continue
            timed[candidate] = capture(call, sets, operator.expected_us(shape))
            if host:
                row["host_us"][candidate] = host_us(call, fresh())
        except Exception as problem:
            text = (str(problem).splitlines() or [""])[0]
            row["problems"][candidate] = f"{type(problem).__name__}: {text[:300]}"
    run_rounds(list(timed.values()))
    row["us"] = {candidate: found.us for candidate, found in timed.items()}
    row["spread"] = {c: (max(t.times) - min(t.times)) / t.us for c, t in timed.items()}
    row["gbps"] = {c: operator.traffic(shape) / us / 1000 for c, us in row["us"].items()}
    if operator.flops is not None:
        row["tflops"] = {c: operator.flops(shape) / us / 1e6 for c, us in row["us"].items()}
    others = [us for candidate, us in row["us"].items() if candidate != OURS]
    row["ratio"] = row["us"][OURS] / min(others) if others and OURS in row["us"] else None
    row["in_mean"] = operator.in_mean
    return row


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the geometric mean of the ratios, in all and by operator, and the shapes behind."""
    ratios = [(row["op"], row["ratio"]) for row in rows if row["ratio"] is not None]
    counted = [row["ratio"] for row in rows if row["ratio"] is not None and row["in_mean"]]

    def mean(values: list[float]) -> float | None:
        return math.exp(statistics.fmean(map(math.log, values))) if values else None

    return {
        "geometric_mean": mean(counted),
        "by_op": {op: mean([r for o, r in ratios if o == op]) for op in dict(ratios)},
        "slower_than_1.05": [
            [row["op"], row["shape"], row["ratio"]] for row in rows if (row["ratio"] or 0) > 1.05
        ],
    }


def table(rows: Sequence[dict[str, Any]], copy_gbps: float) -> str:
    """Return the rows as text."""
    names = list(dict.fromkeys(name for row in rows for name in (OURS, *row["us"])))
    head = f"{'op':<20}{'shape':<22}" + "".join(f"{name:>13}" for name in names)
    lines = [f"{head}{'ratio':>8}{'GB/s':>8}{'of copy':>9}{'TFLOP/s':>9}"]
    for row in rows:
        line = f"{row['op']:<20}{'x'.join(map(str, row['shape'])):<22}"
        line += "".join(f"{us:>13.2f}" if us else f"{'-':>13}" for us in map(row["us"].get, names))
        rate = row["gbps"].get(OURS, 0.0)
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        line += f"{ratio:>8}{rate:>8.0f}{rate / copy_gbps:>9.1%}"
        if OURS in row.get("tflops", {}):
            line += f"{row['tflops'][OURS]:>9.0f}"
        lines.append(line)
    for row in rows:
        if row["host_us"]:
            costs = ", ".join(f"{name} {us:.1f}" for name, us in row["host_us"].items())
            lines.append(f"host us an eager call, {row['op']} {row['shape']}: {costs}")
    for row in rows:
        lines += [f"{row['op']} {row['shape']} {c}: {why}" for c, why in row["problems"].items()]
    return "\n".join(lines)
