"""Measures the modes of one model: engines start together, stay alive and take turns."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.e2e import agreement
from benchmarks.e2e.modes import Mode
from benchmarks.e2e.process import LOGPROBS, Engine, EngineFailed, NoAnswer, stop_all
from benchmarks.e2e.results import Record, Results
from benchmarks.e2e.workloads import CHECK, Workload

SECONDS_TO_MEASURE = 45.0
"""Left for timing when engines are started."""
SECONDS_TO_START = 90.0
"""Of engines that start together, before some have been seen to."""
SECONDS_OF_A_TURN = 1.5
"""Of a workload, which an engine repeats in its turn for so long: a turn's figure is the median, as
the machine holds up a run now and then by a tenth."""
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
        seconds: from its start to its first token.
        tokens: workload -> those of its first run.
        fastest: workload -> seconds of its fastest run.
    """

    engine: Engine
    record: Record
    seconds: float = 0.0
    tokens: dict[Workload, list[list[int]]] = field(default_factory=dict)
    fastest: dict[Workload, float] = field(default_factory=dict)


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
        live: engines that start and are alive at a time.
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
        while group := self._group(self._lacks):
            self._time_group(group)
        for number in range(self.restarts):
            while group := self._group(partial(self._lacks_restart, number)):
                self._restart(group)

    def _group(self, lacks: Callable[[Mode], bool]) -> list[Mode]:
        """Return the baseline and modes that are not through; nothing when all are."""
        baseline, *others = self.modes
        lacking = [mode for mode in others if lacks(mode)]
        if lacking:
            return [baseline, *lacking[: self.live - 1]]
        return [baseline] if not others and lacks(baseline) else []

    def _lacks(self, mode: Mode) -> bool:
        record = self._records[mode.name]
        return not record.error and any(record.rounds(w) < self.rounds for w in self.workloads)

    def _lacks_restart(self, number: int, mode: Mode) -> bool:
        record = self._records[mode.name]
        return not record.error and len(record.restart_ratio) <= number

    def _time_group(self, modes: Sequence[Mode]) -> None:
        self.clock.need(self._start_seconds + SECONDS_TO_MEASURE)
        alive: list[Live] = []
        try:
            late = self._start_in(alive, modes, SECONDS_TO_MEASURE)
            if len(alive) > min(1, len(modes) - 1):
                self._check(alive)
                self._compare(alive)
                self._take_turns(alive)
        finally:
            stop_all(live.engine for live in alive)
        if late:
            raise OutOfTime

    def _start_in(self, alive: list[Live], modes: Sequence[Mode], keep: float = 0.0) -> bool:
        """Start engines, all at the same time; return whether some were late.

        Args:
            alive: gets the engines; those that cannot run or are late leave it again.
            modes: theirs, the baseline first.
            keep: seconds that must be left once an engine runs, or it is late.

        Raises:
            EngineFailed: the baseline cannot run.
            OutOfTime: the baseline is late.
        """
        say(f"starting {', '.join(mode.name for mode in modes)} on {self.key}")
        self._starts += 1
        began = time.perf_counter()
        for mode in modes:
            log = self.folder / f"{self._starts}-{mode.name}.log"
            alive.append(Live(Engine(mode.environ, log), self._records[mode.name]))
        with ThreadPoolExecutor(len(alive)) as pool:
            try:
                starts = [pool.submit(self._wait_for, live, began, keep) for live in alive]
                errors = [start.exception() for start in starts]
            except BaseException:  # what ends this process ends the engines that threads wait for
                stop_all(live.engine for live in alive)
                raise
        late = [live for live, e in zip(alive, errors, strict=True) if isinstance(e, OutOfTime)]
        if alive[0] in late:
            raise OutOfTime
        for live, error in zip(list(alive), errors, strict=True):
            if isinstance(error, EngineFailed):
                self._fail(alive, live.record, "at the start", error)
            elif live in late:
                self._end(alive, live.record)
            elif error is not None:
                raise error
        self._start_seconds = max(live.seconds for live in alive)
        self._warm.update(live.record.mode for live in alive)
        self.results.save()
        return bool(late)

    def _wait_for(self, live: Live, began: float, keep: float) -> None:
        """Wait for an engine's first token."""
        with self.clock.step(keep) as limit:
            live.record.note_facts(live.engine.ask(limit, start=self.engine_arguments))
        with self.clock.step(keep) as limit:
            live.engine.generate(CHECK.prompts(self.vocabulary)[:1], 1, limit)
        live.seconds = time.perf_counter() - began
        dispatched = live.record.facts["dispatched"].items()
        layers = ", ".join(f"{op} -> {implementation}" for op, implementation in dispatched)
        say(f"{live.record.mode} started in {live.seconds:.1f} s; dispatched: {layers or 'none'}")

    def _check(self, alive: list[Live]) -> None:
        """Compare log-probabilities with the baseline's."""
        for live in list(alive):
            try:
                answer = self._generate(live.engine, CHECK, logprobs=LOGPROBS)
            except EngineFailed as error:
                self._fail(alive, live.record, f"during {CHECK}", error)
                continue
            if live is alive[0]:
                expected = answer
            else:
                live.record.logprob_error = agreement.largest_error(answer, expected)
        self.results.save()

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
                    self._run_once(live, workload)
                except EngineFailed as error:
                    self._fail(alive, live.record, f"during {workload}", error)
            baseline, *others = alive
            for live in others:
                live.record.tokens[str(workload)] = found = agreement.compare(
                    workload.prompts(self.vocabulary),
                    live.tokens[workload],
                    baseline.tokens[workload],
                    partial(self._next_tokens, live),
                    partial(self._next_tokens, baseline),
                )
                say(f"{workload} {live.record.mode}: {agreement.describe(found)}")
            self.results.save()

    def _run_once(self, live: Live, workload: Workload) -> float:
        """Run a workload; return its seconds, and note whether its first tokens come again."""
        answer = self._generate(live.engine, workload)
        seconds: float = answer["seconds"]
        live.fastest[workload] = min(seconds, live.fastest.get(workload, seconds))
        same = answer["tokens"] == live.tokens.setdefault(workload, answer["tokens"])
        repeatable = live.record.repeatable
        repeatable[str(workload)] = repeatable.get(str(workload), True) and same
        return seconds

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
        repetitions = math.ceil(SECONDS_OF_A_TURN / alive[0].fastest[workload])
        # Another one begins each round: what comes before a run may make it faster or slower.
        first = alive[0].record.rounds(workload) % len(alive)
        for live in alive[first:] + alive[:first]:
            try:
                seconds = median(self._run_once(live, workload) for _ in range(repetitions))
            except EngineFailed as error:
                self._fail(alive, live.record, f"during {workload}", error)
                continue
            rates[live.record.mode] = workload.batch * workload.output / seconds
        baseline = rates[alive[0].record.mode]
        for live in alive:
            rate = rates[live.record.mode]
            live.record.output_tokens_per_second.setdefault(str(workload), []).append(rate)
            live.record.ratio.setdefault(str(workload), []).append(rate / baseline)
        self.results.save()
        shown = ", ".join(f"{mode} {rate:.1f}" for mode, rate in rates.items())
        say(f"{workload} tokens/s: {shown}")

    def _restart(self, modes: Sequence[Mode]) -> None:
        """Start engines at the same time, from caches that an earlier start of this run filled."""
        cold = {mode.name for mode in modes} - self._warm
        self.clock.need((2 if cold else 1) * self._start_seconds)
        alive: list[Live] = []
        for _ in range(2 if cold else 1):
            alive.clear()
            try:
                late = self._start_in(alive, modes)
            finally:
                stop_all(live.engine for live in alive)
            if late:
                raise OutOfTime
        for live in alive:
            live.record.restart_seconds.append(live.seconds)
            live.record.restart_ratio.append(live.seconds / alive[0].seconds)
        self.results.save()


def say(text: str) -> None:
    """Print progress, with the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
