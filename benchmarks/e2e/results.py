"""What has been measured, kept in a file after every step, from which a later run goes on."""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.e2e.agreement import describe
from benchmarks.e2e.modes import Mode
from benchmarks.e2e.workloads import Workload
from vllm_fl.autotune.statistics import widest_estimate

# The folders of an absolute path, as alone, in quotes, after an = or in a URL they can stand in a
# text.
_FOLDERS = re.compile(r"""(?:(?<![\w.:/-])|(?<=://)|(?<=:///))/(?:[^/\s"',;:=()]+/)+""")


def without_folders(value: Any) -> Any:
    """Return JSON in which absolute paths have only their last part: no machine's are told."""
    if isinstance(value, str):
        return _FOLDERS.sub("", value)
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    return [without_folders(item) for item in value] if isinstance(value, list) else value


@dataclass
class Record:
    """What one mode did on one model.

    Attributes:
        mode: the mode.
        configuration: the text of its configuration.
        error: why it could not run; empty if it could.
        facts: what the engine consists of.
        restart_seconds: of each start from a warm cache, from the process's start to the first
            token, together with the baseline's.
        restart_ratio: for each of those, over the baseline's at the same time.
        output_tokens_per_second: workload -> one figure a round, the median of its repetitions.
        ratio: workload -> for each of those, over the baseline's in the same round.
        tokens: workload -> the comparison with the baseline's tokens; see agreement.py.
        repeatable: workload -> whether every repetition gave the same tokens.
        logprob_error: largest difference of log-probabilities on the checked prompts.
    """

    mode: str
    configuration: str = ""
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    restart_seconds: list[float] = field(default_factory=list)
    restart_ratio: list[float] = field(default_factory=list)
    output_tokens_per_second: dict[str, list[float]] = field(default_factory=dict)
    ratio: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, dict[str, Any]] = field(default_factory=dict)
    repeatable: dict[str, bool] = field(default_factory=dict)
    logprob_error: float | None = None

    def rounds(self, workload: Workload) -> int:
        """Return how many rounds of a workload are timed."""
        return len(self.output_tokens_per_second.get(str(workload), ()))

    def note_facts(self, facts: dict[str, Any]) -> None:
        """Remember what an engine consists of.

        Raises:
            ValueError: figures of another device or other versions are here already.
        """
        for key in ("device", "versions"):
            if self.facts and self.facts[key] != facts[key]:
                raise ValueError(
                    f"{self.mode} was measured with {self.facts[key]}, and here is {facts[key]}: "
                    "give another --out"
                )
        self.facts = without_folders(facts)

    def note_error(self, error: str) -> None:
        """Remember why the mode cannot run."""
        self.error = without_folders(error)


class Results:
    """The file of results.

    Args:
        path: of the JSON file; what it holds is continued.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        content = json.loads(path.read_text()) if path.exists() else {}
        self._commands = [*content.get("commands", ()), without_folders(sys.argv[1:])]
        self._date = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self.models: dict[str, dict[str, Record]] = {
            model: {mode: Record(**record) for mode, record in records.items()}
            for model, records in content.get("models", {}).items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)

    def record(self, model: str, mode: Mode, retry: bool) -> Record:
        """Return a mode's record, a new one if there is none or if it shall be tried again.

        Raises:
            ValueError: the mode meant something else when it was measured.
        """
        records = self.models.setdefault(model, {})
        configuration = without_folders(mode.configuration)
        known = records.get(mode.name)
        if known is None or (retry and known.error):
            known = records[mode.name] = Record(mode.name, configuration)
        if known.configuration != configuration:
            raise ValueError(
                f"mode {mode.name!r} was measured with another configuration in {self._path}: "
                "give it another name, or another --out"
            )
        return known

    def save(self) -> None:
        """Write the file, whole or not at all."""
        content = {
            "commands": self._commands,
            "date": self._date,
            "models": {
                model: {mode: asdict(record) for mode, record in records.items()}
                for model, records in self.models.items()
            },
        }
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(content, indent=1) + "\n")
        new.replace(self._path)
        self._path.with_suffix(".txt").write_text(self.text())

    def text(self) -> str:
        """Return all results as text."""
        return "\n".join(summary(model, records) for model, records in self.models.items())


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows in columns, the first row being the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    return "\n".join((lines[0], "  ".join("-" * width for width in widths), *lines[1:]))


def ratio_text(ratios: Sequence[float]) -> str:
    """Return the median of ratios, with the interval that so many allow and its level."""
    found = widest_estimate(ratios)
    text = f"{statistics.median(ratios):.3f}"
    return f"{text} [{found.low:.3f}, {found.high:.3f}]" if len(ratios) > 1 else text


def summary(model: str, records: dict[str, Record]) -> str:
    """Return a model's results: medians, ratios with intervals, what differs or could not run."""
    workloads = list(dict.fromkeys(w for r in records.values() for w in r.output_tokens_per_second))
    baseline = next(iter(records.values()))
    rows, notes = [["mode", "warm start s", *workloads]], []
    for mode, record in records.items():
        restarts = record.restart_seconds
        row = [mode, f"{statistics.median(restarts):.1f}" if restarts else "-"]
        if record is not baseline and restarts:
            row[-1] += f" ({ratio_text(record.restart_ratio)})"
        for workload in workloads:
            figures = record.output_tokens_per_second.get(workload)
            text = f"{statistics.median(figures):.1f}" if figures else "-"
            ratios = record.ratio.get(workload) if record is not baseline else None
            row.append(f"{text} ({ratio_text(ratios)})" if ratios else text)
        rows.append(row)
        if record.error:
            notes.append(f"{mode} CANNOT RUN:\n  " + record.error.replace("\n", "\n  "))
        notes += [f"{mode}, {w}: {describe(found)}" for w, found in record.tokens.items()]
        notes += [
            f"{mode}, {workload}: repetitions give different tokens"
            for workload, same in record.repeatable.items()
            if not same
        ]
        if record.logprob_error is not None:
            notes.append(f"{mode}: log-probabilities differ by {record.logprob_error:.3g} at most")
    counts = sorted({len(f) for r in records.values() for f in r.output_tokens_per_second.values()})
    done = "/".join(map(str, counts)) or "0"
    heading = (
        f"{model}: output tokens/s, median of {done} rounds (over {baseline.mode} in the same "
        "round: median, and the 95 % interval, or what under 6 rounds allow)"
    )
    return "\n".join((heading, "", table(rows), "", *notes, ""))
