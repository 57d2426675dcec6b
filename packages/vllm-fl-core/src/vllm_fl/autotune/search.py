"""Which configuration to try next: Optuna's studies, with seeds from evidence. No engine here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from vllm_fl.autotune.evidence import Evidence
from vllm_fl.autotune.space import Configuration, Space, distance, needs_restart
from vllm_fl.autotune.studies import DeadTrials, experimental
from vllm_fl.autotune.supervisor import TrialFailed


@dataclass(frozen=True)
class Outcome:
    """What an end-to-end trial found.

    Attributes:
        value: how many times as good as the default the configuration is.
        facts: JSON-ready; stored with the trial.
    """

    value: float
    facts: dict[str, Any] = field(default_factory=dict)


def make_sampler(seed: int | None) -> TPESampler:
    """Return Optuna's tree-structured Parzen estimator, for parameters that act together."""
    with experimental():
        return TPESampler(seed=seed, multivariate=True, n_startup_trials=8)


def seeds(space: Space, evidence: Evidence, count: int) -> list[dict[str, str]]:
    """Return the configurations to try first.

    All of them when there are no more than ``count``, the most promising first, and last what needs
    a restart. Otherwise the default; the best of each operator alone; what is asked once and needs
    no restart, with the best of the others, since it could not be timed; the best with each change
    taken back, which finds out what is fast alone and slow together; and each change alone. In both
    cases one implementation wherever it can run, as in settings that prefer one backend, is tried
    next to the first: the result shall be no worse than the best of those.
    """
    default, live = space.default, evidence.live
    uniform = [
        {op: impl if impl in impls else default[op] for op, impls in space.choices.items()}
        for impl in dict.fromkeys(
            impl for op, impls in space.choices.items() for impl in impls if op not in live
        )
    ]
    if space.size <= count:
        everything = sorted(space.configurations(), key=evidence.predicted)
        found = _each_once(space, [everything[0], *uniform, *everything])
        return sorted(found, key=lambda configuration: needs_restart(default, configuration, live))

    def time_with(op: str, impl: str) -> float:
        return evidence.predicted({**default, op: impl})

    best = {
        op: min(impls, key=lambda impl: time_with(op, impl)) for op, impls in space.choices.items()
    }
    if best == default:  # nothing is known: then what is not the default
        best = {op: impls[1] for op, impls in space.choices.items()}
    found = [default, best, *uniform]
    for op in live.keys() & space.choices.keys():
        found += [{**best, op: impl} for impl in space.choices[op] if impl in live[op]]
    found += [{**best, op: default[op]} for op in space.changes(best)]
    for op in space.changes(best):  # the second best, where taking it back loses something
        others = sorted(space.choices[op], key=lambda impl: time_with(op, impl))
        found += [{**best, op: others[1]}]
    found += [{**default, op: impl} for op, impl in space.changes(best).items()]
    return _each_once(space, found)[:count]


def _each_once(space: Space, configurations: list[dict[str, str]]) -> list[dict[str, str]]:
    return list({space.name(c): c for c in configurations}.values())


@dataclass
class Search:
    """A search in one study; several processes may search in the same one.

    Attributes:
        study: Optuna's study, to be maximised.
        space: what may be chosen.
        evidence: for the seeds and for what to try when the sampler repeats itself.
        trials: how many trials the study may have, those of all processes together.
        deadline: on ``time.monotonic``'s clock.
        evaluate: runs a trial; raises TrialFailed.
        told: called after each trial of this process.
        fits: whether there is time for a configuration's trial.
    """

    study: optuna.Study
    space: Space
    evidence: Evidence
    trials: int
    deadline: float
    evaluate: Callable[[Configuration], Outcome]
    told: Callable[[], None] = lambda: None
    fits: Callable[[Configuration], bool] = lambda configuration: True

    def __post_init__(self) -> None:
        self._dead = DeadTrials(self.study)

    def plant_seeds(self) -> None:
        """Queue the first configurations, as far as there is time for them."""
        for configuration in seeds(self.space, self.evidence, self.trials):
            if self._is_worth_it(configuration):
                self._enqueue(configuration)

    def _enqueue(self, configuration: Configuration) -> None:
        """Queue a configuration that is neither over nor running nor queued.

        One that was left out, for which there was no time, is queued again.
        """
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        known = (*tried(self.study), *_running(self.study), *waiting)
        if configuration not in [t.system_attrs.get("fixed_params", t.params) for t in known]:
            self.study.enqueue_trial(dict(configuration))

    def run(self) -> None:
        """Try configurations until trials or time are used up, or nothing is left to try."""
        while not self._finished():
            if self._must_wait():
                time.sleep(1)
                continue
            with experimental():
                self.study.optimize(self._objective, n_trials=1, catch=(TrialFailed,))
            self.told()

    def _finished(self) -> bool:
        if time.monotonic() >= self.deadline:
            return True
        self._dead.fail()
        if len(tried(self.study)) >= self.trials:
            return True
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return not waiting and not _running(self.study) and next(self._untried(), None) is None

    def _must_wait(self) -> bool:
        """Whether the trials of other processes that still run may be the last ones."""
        running = len(_running(self.study))
        if len(tried(self.study)) + running >= self.trials:
            return True
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return bool(running) and not waiting and next(self._untried(), None) is None

    def _objective(self, trial: Trial) -> float:
        self._dead.begin(trial)
        configuration = {
            op: str(trial.suggest_categorical(op, impls))
            for op, impls in self.space.choices.items()
        }
        others = [
            t for t in (*tried(self.study), *_running(self.study)) if t.number != trial.number
        ]
        if sum(other.number < trial.number for other in others) >= self.trials:
            raise optuna.TrialPruned("another process has begun the last trial at the same time")
        taken = [dict(other.params) for other in others]
        if configuration in taken or not self._is_worth_it(configuration):
            nearest = next(self._untried(), None)
            if nearest is not None:
                self._enqueue(nearest)
            raise optuna.TrialPruned(
                "it has been tried, holds a choice that failed alone, or takes too long"
            )
        try:
            outcome = self.evaluate(configuration)
        except TrialFailed as failure:
            trial.set_user_attr("failure", str(failure))
            raise
        except KeyboardInterrupt:
            self.study.enqueue_trial(configuration)  # for whoever continues the study
            raise
        for key, value in outcome.facts.items():
            trial.set_user_attr(key, value)
        return outcome.value

    def _is_worth_it(self, configuration: Configuration) -> bool:
        failed = failed_alone(self.study, self.space)
        return self.fits(configuration) and failed.isdisjoint(configuration.items())

    def _untried(self) -> Iterator[dict[str, str]]:
        """Yield what has not been tried, the nearest to the best so far first.

        Of large spaces only what differs from the best in one or two operators.
        """
        taken = [dict(t.params) for t in (*tried(self.study), *_running(self.study))]
        centre = best(self.study)
        around = dict(centre.params) if centre is not None else self.space.default
        if self.space.size <= 4096:
            candidates = list(self.space.configurations())
        else:
            candidates = list(_neighbours(self.space, around))
        candidates.sort(key=lambda c: (distance(c, around), self.evidence.predicted(c)))
        for candidate in candidates:
            if candidate not in taken and self._is_worth_it(candidate):
                yield candidate


def _neighbours(space: Space, around: Configuration) -> Iterator[dict[str, str]]:
    for op, impls in space.choices.items():
        for impl in impls:
            one = {**around, op: impl}
            yield one
            for second, others in space.choices.items():
                yield from ({**one, second: other} for other in others if second != op)


def tried(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that are over: measured, or failed of themselves.

    A trial whose process was killed does not count: it is repeated.
    """
    over = (TrialState.COMPLETE, TrialState.FAIL)
    trials = study.get_trials(deepcopy=False, states=over)
    return [t for t in trials if t.state == TrialState.COMPLETE or "failure" in t.user_attrs]


def failed_alone(study: optuna.Study, space: Space) -> set[tuple[str, str]]:
    """Return (operator, choice) of the choices whose trial, all others at default, failed."""
    failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
    changes = [
        list(space.changes(t.params).items())
        for t in failed
        if t.params and "failure" in t.user_attrs
    ]
    return {change[0] for change in changes if len(change) == 1}


def _running(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """Return the measured trials, best first."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(done, key=lambda t: -(t.value or 0.0))


def best(study: optuna.Study) -> FrozenTrial | None:
    """Return the best measured trial."""
    order = ranked(study)
    return order[0] if order else None
