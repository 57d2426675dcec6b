"""Measures the modes of one model: engines that are alive together take turns."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.e2e import agreement
from benchmarks.e2e.modes import Mode
from benchmarks.e2e.process import LOGPROBS, Engine, EngineFailed, NoAnswer, stop_all
from benchmarks.e2e.results import Record, Results
from benchmarks.e2e.workloads import CHECK, Workload

SECONDS_TO_MEASURE = 45.0
"""Left for timing when an engine is started."""
SECONDS_TO_START = 60.0
"""Of a start, before one has been seen."""
WARM_START = 0.6
"""Of the first start's time: later ones find the files read and much compiled (91 s, then 55 s)."""
LONGEST_STEP = 1800.0
"""Seconds after which an engine that does not answer has failed."""


class OutOfTime(Exception):
    """The next step would not end within the time."""


class Clock:
    """The time that is left.

    Args:
        seconds: in all; None for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def need(self, seconds: float) -> None:
        """Check that there is time.

        Raises:
            OutOfTime: there is not.
        """
        if self._end is not None and time.monotonic() + seconds > self._end:
            raise OutOfTime

    @contextmanager
    def step(self, keep: float = 0.0) -> Iterator[float]:
        """Give the seconds that a step may wait for an engine.

        Args:
            keep: seconds that must be left after it.

        Raises:
            OutOfTime: there are none, or the engine has not answered within those left.
        """
        left = math.inf if self._end is None else self._end - keep - time.monotonic()
        if left <= 0:
            raise OutOfTime
        try:
            yield min(left, LONGEST_STEP)
        except NoAnswer as error:
            if left < LONGEST_STEP:
                raise OutOfTime from error
            raise


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
                    self._start_in(alive, mode)
                except OutOfTime:
                    out_of_time = True  # those that are alive can still be compared
                    break
            if len(alive) > min(1, len(modes) - 1):
                self._compare(alive)
                self._take_turns(alive)
        finally:
            stop_all(live.engine for live in alive)
        if out_of_time:
            raise OutOfTime

    def _start_in(self, alive: list[Live], mode: Mode) -> None:
        """Start an engine and add it to those alive, unless it cannot run.

        Raises:
            OutOfTime: it takes too long; where others can be compared, their time is kept.
        """
        record = self._records[mode.name]
        try:
            engine, seconds = self._start(mode, record, SECONDS_TO_MEASURE if alive[1:] else 0.0)
            alive.append(Live(engine, record))
            alive[-1].check = self._generate(engine, CHECK, logprobs=LOGPROBS)
        except EngineFailed as error:
            self._fail(alive, record, "at the start", error)
            return
        except OutOfTime:
            self._end(alive, record)
            raise
        record.startup_seconds.append(seconds)
        if alive[0] is not alive[-1]:
            record.logprob_error = agreement.largest_error(alive[-1].check, alive[0].check)
        self.results.save()
        layers = ", ".join(f"{op} -> {impl}" for op, impl in record.facts["dispatched"].items())
        say(f"{mode.name} started in {seconds:.1f} s; dispatched: {layers or 'none'}")

    def _start(self, mode: Mode, record: Record, keep: float = 0.0) -> tuple[Engine, float]:
        """Start an engine; return it with the seconds until its first token.

        ``keep`` seconds must be left then.
        """
        self._starts += 1
        say(f"starting {mode.name} on {self.key}")
        began = time.perf_counter()
        engine = Engine(mode.environ, self.folder / f"{self._starts}-{mode.name}.log")
        try:
            with self.clock.step(keep) as limit:
                facts = engine.ask(limit, start=self.engine_arguments)
            with self.clock.step(keep) as limit:
                engine.generate(CHECK.prompts(self.vocabulary)[:1], 1, limit)
            seconds = time.perf_counter() - began
            record.note_facts(facts)
        except BaseException:
            engine.stop()
            raise
        next_start = seconds * WARM_START if self._starts == 1 else seconds
        self._start_seconds = max(self._start_seconds / 2, next_start)
        self._warm.add(mode.name)
        return engine, seconds

    def _generate(self, engine: Engine, workload: Workload, **more: Any) -> dict[str, Any]:
        prompts = workload.prompts(self.vocabulary)
        with self.clock.step() as limit:
            return engine.generate(prompts, workload.output, limit, **more)

    def _fail(self, alive: list[Live], record: Record, where: str, error: EngineFailed) -> None:
        """Note that a mode cannot run, and end its engine.

        Raises:
            EngineFailed: it is the baseline, and nothing can be compared with it.
        """
        record.note_error(f"{where}: {error}")
        self.results.save()
        say(f"{record.mode} cannot run, {where}:\n{error}")
        self._end(alive, record)
        if record is self._records[self.modes[0].name]:
            raise error

    def _end(self, alive: list[Live], record: Record) -> None:
        """End a mode's engine, if it is alive."""
        for live in [live for live in alive if live.record is record]:
            alive.remove(live)
            live.engine.stop()

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
        with self.clock.step() as limit:
            answer = live.engine.generate(prompts, 1, limit, logprobs=LOGPROBS)
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
        # Another one begins each round: what comes before a run may make it faster or slower.
        first = alive[0].record.rounds(workload) % len(alive)
        for live in alive[first:] + alive[:first]:
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
