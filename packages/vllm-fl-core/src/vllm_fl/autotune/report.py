"""Reports of a study: a page that fetches nothing, and a text."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import jinja2

from vllm_fl.autotune.charts import BLUE, GREEN, GREY, RED, Point, bars, dots
from vllm_fl.autotune.evidence import Evidence, relative_time


def html(found: dict[str, Any]) -> str:
    """Return the page. ``found`` is what :func:`vllm_fl.autotune.tune` returns."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = files("vllm_fl.autotune").joinpath("report.html.jinja").read_text(encoding="utf-8")
    evidence = Evidence.from_dict(found["evidence"])
    return environment.from_string(template).render(
        found=found,
        verdict=verdict(found),
        trials_chart=_trials_chart(found),
        gains_chart=_gains_chart(evidence),
        timing_charts=_timing_charts(evidence),
        operators=_operator_rows(evidence),
        interval=interval,
    )


def is_decided(found: dict[str, Any]) -> bool:
    """Whether the result is that of all trials."""
    return found["result"] is not None and not (found["interrupted"] or found["undecided"])


def verdict(found: dict[str, Any]) -> str:
    """Say in a sentence how it ended, and in another what there was no time to try."""
    left_out = found["result"].get("left_out") if is_decided(found) else ""
    return f"{_ending(found)} Not tried: {left_out}." if left_out else _ending(found)


def _ending(found: dict[str, Any]) -> str:
    result = found["result"]
    if found["undecided"]:
        return f"Not decided yet: {found['undecided']}. --resume with more time goes on."
    if not is_decided(found):
        return "Not decided yet: continue with --resume."
    if result["winner"] is None:
        return f"The default stays: {result['reason']}."
    last = result["confirmations"][-1]
    sentence = f"{result['name']} is {interval(last['gain'])} times as good as the default."
    if last["verification"].get("same_as_platform"):
        sentence += " It is what the platform's own defaults choose: nothing is compared."
    for who, reason in last["verification"].get("failed", {}).items():
        sentence += f" {who[0].upper()}{who[1:]} failed and is not compared: {reason}."
    over = last["verification"].get("against_platform")
    if over is not None:
        sentence += f" It is {interval(over)} times as good as the platform's own defaults."
        if is_worse_than_platform(found):
            sentence += " Do not use it instead of those."
        elif not over["low"] > 1:
            sentence += " That is within the noise."
    return sentence


def is_worse_than_platform(found: dict[str, Any]) -> bool:
    """Whether the winner is surely slower than the platform's own defaults."""
    verification = found["result"]["confirmations"][-1]["verification"]
    high = verification.get("against_platform", {}).get("high")
    return high is not None and high < 1


def interval(estimate: dict[str, Any]) -> str:
    """Write an estimate with its interval and level."""
    low, high = estimate["low"], estimate["high"]
    if high is None:
        return f"{estimate['value']:.4g} (too few values for an interval)"
    return f"{estimate['value']:.4g} [{low:.4g}, {high:.4g}] ({100 * estimate['level']:.3g} %)"


def text(found: dict[str, Any]) -> str:
    """Return the summary as text."""
    lines = [verdict(found), ""]
    measured = sorted(
        (t for t in found["trials"] if t["value"] is not None), key=lambda t: -t["value"]
    )
    failed = [t for t in found["trials"] if t["value"] is None]
    lines.append(
        f"{len(measured)} trials measured, {len(failed)} failed, of {found['size']} configurations."
    )
    lines += [f"  {interval(t['ratio'])}  {t['name']}" for t in measured[:5]]
    lines += [f"  failed: {t['name']}: {t['failure'][:160]}" for t in failed[:5]]
    evidence = Evidence.from_dict(found["evidence"])
    for op, entry in evidence.operators.items():
        lines += [f"  left out: {op}={i}: {why[:160]}" for i, why in entry.excluded.items()]
    lines += [f"  left at its default: {op}: {why}" for op, why in evidence.left.items()]
    result = found["result"]
    for entry in (result or {}).get("confirmations", ()):
        if "failure" in entry:
            lines.append(f"  not confirmed: {entry['name']}: {entry['failure'][:160]}")
        else:
            lines.append(
                f"  confirmation of {entry['name']}: gain {interval(entry['gain'])}, noise "
                f"{interval(entry['noise'])}, {entry['rounds']} rounds"
            )
    if found["rate"]:
        live, restarting = found["rate"]["live"], found["rate"]["restarting"]
        lines.append(f"  {live:.2g} trials/min re-bound, {restarting:.2g} with restarts (estimate)")
    return "\n".join(lines)


def _trials_chart(found: dict[str, Any]) -> str:
    points = [
        Point(
            t["name"],
            t["value"],
            t["ratio"]["low"],
            t["ratio"]["high"],
            GREEN if t["ratio"]["low"] > 1 else RED if t["ratio"]["high"] < 1 else BLUE,
        )
        for t in found["trials"]
        if t["value"] is not None
    ]
    return dots(points, "Trials", "trial; times as good as the default") if points else ""


def _gains_chart(evidence: Evidence) -> str:
    space = evidence.wide_space()
    points = []
    for op, impls in space.choices.items():
        entry = evidence.operators[op]
        for impl in impls[1:]:
            gain = 100 * entry.share * (1 - relative_time(entry, impl))
            points.append(Point(f"{op}={impl}", gain, colour=GREEN if gain > 0 else RED))
    return bars(points, "Gains by operator", "% of the time, from timings alone") if points else ""


def _timing_charts(evidence: Evidence) -> list[tuple[str, str, str]]:
    charts = []
    for op, entry in evidence.operators.items():
        for call, by_impl in entry.estimates().items():
            points = [
                Point(
                    impl, 1e6 * e.value, 1e6 * e.low, 1e6 * e.high,
                    GREY if impl == entry.default else BLUE,
                )
                for impl, e in by_impl.items()
            ]  # fmt: skip
            charts.append((op, call, bars(points, f"{op} {call}", "microseconds a call, median")))
    return charts


def _operator_rows(evidence: Evidence) -> list[dict[str, Any]]:
    return [
        {
            "op": op,
            "default": entry.default,
            "calls": int(sum(number for number, _ in entry.calls.values())),
            "shapes": len(entry.calls),
            "share": 100 * entry.share,
            "available": entry.available,
            "excluded": entry.excluded,
            "left": evidence.left.get(op, ""),
        }
        for op, entry in evidence.operators.items()
    ]
