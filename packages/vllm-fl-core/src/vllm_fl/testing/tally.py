"""Counting how cases ended, and the table at the end."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from vllm_fl.cli.tables import table

OUTCOMES = ("passed", "failed", "excluded", "declined", "refused", "skipped")
SHOWN = 10  # kinds of failures an operator


@dataclass(eq=False)
class Tally:
    """How every case ended. It is a pytest plugin: pytest tells it.

    Attributes:
        counts: operator -> outcome -> number of cases.
        reasons: (operator, outcome, reason) -> number of cases, for what neither passed nor failed.
        failures: operator -> (case, what happened).
        notes: (operator, note, value) -> number of cases.
    """

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    reasons: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    failures: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    notes: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take the report of one phase of one test."""
        properties = dict(report.user_properties)
        if "operator" not in properties or (report.when != "call" and not report.failed):
            return
        op_name, case = properties.pop("operator"), properties.pop("case")
        outcome, reason = _outcome(report)
        self.counts[op_name][outcome] += 1
        if outcome == "failed":
            self.failures[op_name].append((case, reason))
        elif outcome != "passed":
            self.reasons[op_name, outcome, reason] += 1
        for note, value in properties.items():
            self.notes[op_name, note, value] += 1

    @property
    def failed(self) -> int:
        """The number of cases that failed."""
        return sum(counts["failed"] for counts in self.counts.values())

    def as_data(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "operators": {
                op_name: {outcome: counts[outcome] for outcome in OUTCOMES}
                for op_name, counts in self.counts.items()
            },
            "reasons": [
                {"operator": op_name, "outcome": outcome, "reason": reason, "cases": cases}
                for (op_name, outcome, reason), cases in self.reasons.items()
            ],
            "failures": [
                {"operator": op_name, "case": case, "error": error}
                for op_name, failures in self.failures.items()
                for case, error in failures
            ],
            "notes": [
                {"operator": op_name, "note": note, "value": value, "cases": cases}
                for (op_name, note, value), cases in self.notes.items()
            ],
        }

    def as_text(self) -> str:
        """Return the table, the reasons below it, the notes and the first failures.

        Cases that failed with one error, as all of a function with a wrong signature do, are told
        together.
        """
        rows = [
            [op_name, *(str(counts[outcome]) for outcome in OUTCOMES)]
            for op_name, counts in self.counts.items()
        ]
        parts = [table(["operator", *OUTCOMES], rows)]
        if self.reasons:
            lines = [
                [op_name, outcome, str(cases), reason]
                for (op_name, outcome, reason), cases in self.reasons.items()
            ]
            parts.append(table(["operator", "outcome", "cases", "reason"], lines))
        if self.notes:
            lines = [
                [op_name, str(cases), f"{note}: {value}"]
                for (op_name, note, value), cases in self.notes.items()
            ]
            parts.append(table(["operator", "cases", "note"], lines))
        for op_name, failures in self.failures.items():
            cases: dict[str, list[str]] = defaultdict(list)
            for case, error in failures:
                cases[error].append(case)
            shown = [
                f"  {first}{f' and {len(others)} more' if others else ''}\n    {error}"
                for error, (first, *others) in list(cases.items())[:SHOWN]
            ]
            untold = sum(map(len, list(cases.values())[SHOWN:]))
            shown += [f"  ... and {untold} more"] if untold else []
            parts.append("\n".join([f"Failed cases of {op_name}:", *shown]))
        return "\n\n".join(parts)


def _outcome(report: Any) -> tuple[str, str]:
    """Return outcome and reason of a report."""
    if report.skipped:
        if hasattr(report, "wasxfail"):
            return "excluded", report.wasxfail
        outcome, _, reason = report.longrepr[2].removeprefix("Skipped: ").partition(": ")
        return outcome, reason
    if report.failed:
        if isinstance(report.longrepr, str):  # an unexpected pass
            return "failed", report.longrepr
        return "failed", report.longrepr.reprcrash.message.splitlines()[0]
    return "passed", ""
