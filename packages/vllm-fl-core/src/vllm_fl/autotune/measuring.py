"""Measuring configurations against the default in turns, and deciding about the winner.

Works on anything that can measure (:class:`Arena`): engines, or a model of one in a test.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Protocol

from vllm_fl.autotune.objective import METRICS, Objective
from vllm_fl.autotune.search import Outcome
from vllm_fl.autotune.space import Configuration
from vllm_fl.autotune.statistics import (
    LEVEL,
    Estimate,
    is_gain,
    median_estimate,
    ratio_estimate,
    widest_estimate,
)
from vllm_fl.dispatch.types import Decision

PAIRS = (3, 6)
"""Pairs of runs in a trial: at least, and at most when it looks better than the default."""
LOOKS: tuple[int, ...] = (12, 18, 26)
"""After so many rounds of the confirmation it is looked whether the interval decides."""


class OutOfTime(Exception):
    """The time was used up before anything could be decided; the text says before what."""


class Arena(Protocol):
    """Where configurations are measured."""

    def admit(self, configuration: Configuration) -> None:
        """Make a configuration ready and check what it generates.

        Raises:
            TrialFailed: it cannot run, or generates something else than the reference.
        """

    def measure(self, configuration: Configuration) -> Mapping[str, float]:
        """Serve the workload once under a configuration, warm; return its metrics.

        Raises:
            TrialFailed: it cannot run.
        """


@dataclass(frozen=True)
class Confirmation:
    """A fresh comparison of a candidate with the default.

    Attributes:
        gain: candidate over default.
        noise: default over default.
        decision: whether the candidate wins, and why not.
        rounds: how many rounds were run.
    """

    gain: Estimate
    noise: Estimate
    decision: Decision
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        """Return the content as JSON-ready containers."""
        return finite(asdict(self))


def finite(content: dict[str, Any]) -> dict[str, Any]:
    """Return nested data with infinities as None, which JSON and YAML can hold."""

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(inner) for key, inner in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {key: convert(value) for key, value in content.items()}


def run_trial(
    arena: Arena, objective: Objective, default: Configuration, candidate: Configuration
) -> Outcome:
    """Admit a candidate and measure it in turns with the default.

    The value is the median of the ratios: of few runs, one that was slow must not decide.

    Raises:
        TrialFailed: it was not admitted, or a run failed.
    """
    arena.admit(candidate)
    runs: dict[str, list[Mapping[str, float]]] = {"default": [], "candidate": []}
    pair = [("default", default), ("candidate", candidate)]
    ratios: list[float] = []
    while len(ratios) < PAIRS[0] or (len(ratios) < PAIRS[1] and median(ratios) > 1):
        # Who goes first changes, in case that matters.
        for name, configuration in pair if len(ratios) % 2 == 0 else reversed(pair):
            runs[name].append(arena.measure(configuration))
        ratios.append(objective.ratio(runs["candidate"][-1], runs["default"][-1]))
    estimate = replace(widest_estimate(ratios), value=median(ratios))
    facts: dict[str, Any] = {"ratios": ratios, "ratio": finite(asdict(estimate))}
    for name, measured in runs.items():
        facts[name] = {
            key: finite(asdict(median_estimate([run[key] for run in measured])))
            for key, _, _ in METRICS.values()
        }
    return Outcome(estimate.value, facts)


def confirm(
    arena: Arena,
    objective: Objective,
    default: Configuration,
    candidate: Configuration,
    tests: int,
    over: Callable[[], bool] = lambda: False,
    looks: Sequence[int] = LOOKS,
) -> Confirmation:
    """Compare a candidate with the default on fresh runs.

    Each round has two runs of the default and one of the candidate, in changing order. The level
    is corrected (Bonferroni) for the number of candidates and of looks. A round in which the time
    ends does not count.

    Args:
        arena: where to measure.
        objective: what is compared.
        default: the default.
        candidate: what may win.
        tests: how many candidates may be confirmed in all.
        over: whether the time is used up; asked before each run.
        looks: after so many rounds it is looked; the last is the end.

    Raises:
        TrialFailed: a run failed.
        OutOfTime: the time was used up before the first look, and nothing is decided.
    """
    level = 1 - (1 - LEVEL) / (tests * len(looks))
    runs = {"default": default, "candidate": candidate, "again": default}
    gains: list[float] = []
    noises: list[float] = []
    arena.admit(candidate)
    ended = False
    while not ended:
        measured: dict[str, Mapping[str, float]] = {}
        for name in _turns(len(gains)):
            ended = over()
            if ended:
                break
            measured[name] = arena.measure(runs[name])
        else:
            one, two = measured["default"], measured["again"]
            against = [objective.ratio(measured["candidate"], run) for run in (one, two)]
            gains.append(math.sqrt(against[0] * against[1]))
            noises.append(objective.ratio(two, one))
        if gains and (ended or len(gains) in looks):
            gain, noise = ratio_estimate(gains, level), ratio_estimate(noises)
            decision = is_gain(gain, noise)
            exhausted = len(gains) == looks[-1] or (ended and len(gains) >= looks[0])
            if decision or gain.high < 1 or exhausted:
                return Confirmation(gain, noise, decision, len(gains))
    done = f"{len(gains)} of the {looks[0]} rounds that a confirmation needs"
    raise OutOfTime(f"the time was used up after {done}")


def engine_starts(rounds: int) -> int:
    """Return how many engines a confirmation starts where each change of turns needs one."""
    turns = ["candidate", *(name for number in range(rounds) for name in _turns(number))]
    needs = [name == "candidate" for name in turns]
    return 1 + sum(one != other for one, other in itertools.pairwise(needs))


def _turns(number: int) -> tuple[str, ...]:
    """Return the order of the runs in a round of the confirmation."""
    order = ("default", "candidate", "again")
    return (*order[number % 3 :], *order[: number % 3])
