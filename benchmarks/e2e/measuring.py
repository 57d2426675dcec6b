"""Measures the modes of one model: engines that are alive together take turns."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.e2e import agreement
from benchmarks.e2e.modes import Mode
from benchmarks.e2e.process import LOGPROBS, Engine, EngineFailed, stop_all
from benchmarks.e2e.results import Record, Results
from benchmarks.e2e.workloads import CHECK, Workload

SECONDS_TO_MEASURE = 45.0
"""Left for timing when an engine is started."""
SECONDS_TO_START = 60.0
"""Of a start, before one has been seen."""


class OutOfTime(Exception):
    """The next step would not end within the time."""


class Clock:
    """The time that is left.

    Args:
        seconds: in all; None for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def limit(self) -> float:
        """Seconds that a step may take: what is left, or half an hour."""
        return 1800.0 if self._end is None else max(1.0, self._end - time.monotonic())

    def need(self, seconds: float) -> None:
        """Check that there is time.

        Raises:
            OutOfTime: there is not.
        """
        if self._end is not None and time.monotonic() + seconds > self._end:
            raise OutOfTime


@dataclass
class Live:
    """An engine that is alive.

    Attributes:
        engine: its process.
        record: of its mode.
        check: its answer to the checked prompts.
        first: workload -> the tokens of its first run.
    """

    engine: Engine
    record: Record
    check: dict[str, Any] = field(default_factory=dict)
    first: dict[Workload, list[list[int]]] = field(default_factory=dict)


@dataclass
class Bench:
    """The measurement of one model.

    Attributes:
        key: its name in the results.
        engine_arguments: of LLM, the model among them.
        vocabulary: its size.
        modes: what to compare; the first is the baseline.
        workloads: what is timed.
        rounds: how often each mode runs each workload.
        restarts: how often each mode is started from a warm cache.
        live: engines alive at a time.
        results: where figures go.
        clock: the time.
        folder: for logs.
        retry: whether to try again what could not run.
    """

    key: str
    engine_arguments: dict[str, Any]
    vocabulary: int
    modes: Sequence[Mode]
    workloads: Sequence[Workload]
    rounds: int
    restarts: int
    live: int
    results: Results
    clock: Clock
    folder: Path
    retry: bool = False
    _starts: int = 0
    _start_seconds: float = SECONDS_TO_START
    _warm: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._records = {
            mode.name: self.results.record(self.key, mode, self.retry) for mode in self.modes
        }

    def run(self) -> None:
        """Measure what the results lack.

        Raises:
            OutOfTime: something is left to do.
            EngineFailed: the baseline could not run.
        """
        while group := self._next_group():
            self._time_group(group)
        for number in range(self.restarts):
            for mode in self.modes:
                self._restart(mode, number)

    def _next_group(self) -> list[Mode]:
        """Return the baseline and modes that are not through; nothing when all are."""
        baseline, *others = self.modes
        lacking = [mode for mode in others if self._lacks(mode)]
        if lacking:
            return [baseline, *lacking[: self.live - 1]]
        return [baseline] if not others and self._lacks(baseline) else []

    def _lacks(self, mode: Mode) -> bool:
        record = self._records[mode.name]
        return not record.error and any(record.rounds(w) < self.rounds for w in self.workloads)

    def _time_group(self, modes: Sequence[Mode]) -> None:
        alive: list[Live] = []
        out_of_time = False
        try:
            for mode in modes:
                try:
                    self.clock.need(self._start_seconds + SECONDS_TO_MEASURE)
                except OutOfTime:
                    out_of_time = True  # those that are alive can still be compared
                    break
                self._start_in(alive, mode)
            if len(alive) > min(1, len(modes) - 1):
                self._compare(alive)
                self._take_turns(alive)
        finally:
            stop_all(live.engine for live in alive)
        if out_of_time:
            raise OutOfTime

    def _start_in(self, alive: list[Live], mode: Mode) -> None:
        """Start an engine and add it to those alive, unless it cannot run."""
        record = self._records[mode.name]
        try:
            engine, seconds = self._start(mode, record)
            alive.append(Live(engine, record))
            alive[-1].check = self._generate(engine, CHECK, logprobs=LOGPROBS)
        except EngineFailed as error:
            self._fail(alive, record, "at the start", error)
            return
        record.startup_seconds.append(seconds)
        if alive[0] is not alive[-1]:
            record.logprob_error = agreement.largest_error(alive[-1].check, alive[0].check)
        self.results.save()
        layers = ", ".join(f"{op} -> {impl}" for op, impl in record.facts["dispatched"].items())
        say(f"{mode.name} started in {seconds:.1f} s; dispatched: {layers or 'none'}")

    def _start(self, mode: Mode, record: Record) -> tuple[Engine, float]:
        """Start an engine; return it with the seconds until its first token."""
        self._starts += 1
        say(f"starting {mode.name} on {self.key}")
        began = time.perf_counter()
        engine = Engine(mode.environ, self.folder / f"{self._starts}-{mode.name}.log")
        try:
            facts = engine.ask(self.clock.limit, start=self.engine_arguments)
            engine.generate(CHECK.prompts(self.vocabulary)[:1], 1, self.clock.limit)
            seconds = time.perf_counter() - began
            record.note_facts(facts)
        except BaseException:
            engine.stop()
            raise
        self._start_seconds = max(self._start_seconds / 2, seconds)
        self._warm.add(mode.name)
        return engine, seconds

    def _generate(self, engine: Engine, workload: Workload, **more: Any) -> dict[str, Any]:
        prompts = workload.prompts(self.vocabulary)
        return engine.generate(prompts, workload.output, self.clock.limit, **more)

    def _fail(self, alive: list[Live], record: Record, where: str, error: EngineFailed) -> None:
        """Note that a mode cannot run, and end its engine.

        Raises:
            EngineFailed: it is the baseline, and nothing can be compared with it.
        """
        record.error = f"{where}: {error}"
        self.results.save()
        say(f"{record.mode} cannot run, {where}:\n{error}")
        for live in [live for live in alive if live.record is record]:
            alive.remove(live)
            live.engine.stop()
        if record is self._records[self.modes[0].name]:
            raise error

    def _compare(self, alive: list[Live]) -> None:
        """Run every workload once untimed, which warms up, and compare the tokens."""
        for workload in self.workloads:
            for live in list(alive):
                try:
                    live.first[workload] = self._generate(live.engine, workload)["tokens"]
                except EngineFailed as error:
                    self._fail(alive, live.record, f"during {workload}", error)
            baseline, *others = alive
            for live in others:
                live.record.tokens[str(workload)] = found = agreement.compare(
                    workload.prompts(self.vocabulary),
                    live.first[workload],
                    baseline.first[workload],
                    partial(self._next_tokens, live),
                    partial(self._next_tokens, baseline),
                )
                say(f"{workload} {live.record.mode}: {agreement.describe(found)}")
            self.results.save()

    def _next_tokens(self, live: Live, prompts: list[list[int]]) -> list[dict[str, float]]:
        answer = live.engine.generate(prompts, 1, self.clock.limit, logprobs=LOGPROBS)
        return [steps[0] for steps in answer["logprobs"]]

    def _take_turns(self, alive: list[Live]) -> None:
        """Time the workloads; a round is one run of each by every engine, in turn."""
        longest = 0.0
        while any(live.record.rounds(w) < self.rounds for live in alive[1:] or alive
                  for w in self.workloads):  # fmt: skip
            self.clock.need(longest)
            began = time.perf_counter()
            for workload in self.workloads:
                self._take_turn(alive, workload)
            longest = max(longest, time.perf_counter() - began)

    def _take_turn(self, alive: list[Live], workload: Workload) -> None:
        rates: dict[str, float] = {}
        for live in list(alive):
            try:
                answer = self._generate(live.engine, workload)
            except EngineFailed as error:
                self._fail(alive, live.record, f"during {workload}", error)
                continue
            rates[live.record.mode] = workload.batch * workload.output / answer["seconds"]
            same = answer["tokens"] == live.first[workload]
            repeatable = live.record.repeatable
            repeatable[str(workload)] = repeatable.get(str(workload), True) and same
        baseline = rates[alive[0].record.mode]
        for live in alive:
            rate = rates[live.record.mode]
            live.record.output_tokens_per_second.setdefault(str(workload), []).append(rate)
            live.record.ratio.setdefault(str(workload), []).append(rate / baseline)
        self.results.save()
        shown = ", ".join(f"{mode} {rate:.1f}" for mode, rate in rates.items())
        say(f"{workload} tokens/s: {shown}")

    def _restart(self, mode: Mode, number: int) -> None:
        """Start an engine alone, from a cache that an earlier start of this run has filled."""
        record = self._records[mode.name]
        if record.error or len(record.restart_seconds) > number:
            return
        starts = 1 if mode.name in self._warm else 2
        self.clock.need(starts * self._start_seconds)
        for _ in range(starts):
            try:
                engine, seconds = self._start(mode, record)
            except EngineFailed as error:
                self._fail([], record, "at a restart", error)
                return
            engine.stop()
        record.restart_seconds.append(seconds)
        self.results.save()
        say(f"{mode.name} restarted in {seconds:.1f} s")


def say(text: str) -> None:
    """Print progress, with the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
