"""Cheap evidence: what a model calls, how long each implementation takes alone, what to leave out.

The decisions are pure. A kernel that is fast alone may slow the whole, so evidence only removes
choices and says in which order to try the rest; what is chosen is decided by end-to-end trials.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_fl.autotune.space import ASKED_ONCE, Configuration, Space
from vllm_fl.autotune.statistics import Estimate, median_estimate

DOMINATED = 1.25
"""An implementation is left out when, surely, it takes so many times as long as the best one."""


@dataclass
class OperatorEvidence:
    """What is known about one operator.

    Attributes:
        available: implementations that can run here, the default first.
        share: the part of the workload's time, run eagerly, that is spent in it; 0 to 1. Where the
            default does not call it, under the first choice that does.
        calls: call as described -> [number, seconds], of the eager run.
        timings: call -> implementation -> seconds of one call, by sample.
        excluded: implementation -> why it is not tried.
        failed: those of the excluded that fail or do not agree with the reference.
        live: of an operator that is asked when the model is built, the choices among which a
            running engine can change.
        serves: of such an operator, whether the default was seen to serve. Otherwise vLLM's own
            does.
    """

    available: tuple[str, ...]
    share: float = 0.0
    calls: dict[str, list[float]] = field(default_factory=dict)
    timings: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    live: tuple[str, ...] = ()
    serves: bool = False

    @property
    def default(self) -> str:
        """The implementation in force without tuning."""
        return self.available[0]

    def exclude_failed(self, impl: str, why: str) -> None:
        """Exclude a choice that is not even one to fall back to."""
        self.excluded[impl] = why
        self.failed = (*self.failed, impl)

    def top_calls(self, count: int) -> list[str]:
        """Return the calls that take the most time."""
        return sorted(self.calls, key=lambda call: -self.calls[call][1])[:count]

    def estimates(self) -> dict[str, dict[str, Estimate]]:
        """Return call -> implementation -> the median time of one call, in seconds."""
        return {
            call: {impl: median_estimate(times) for impl, times in by_impl.items()}
            for call, by_impl in self.timings.items()
        }


@dataclass
class Evidence:
    """What is known about every operator that the model calls.

    Attributes:
        operators: operator -> its evidence.
        left: operator -> why it is left at its default.
    """

    operators: dict[str, OperatorEvidence]
    left: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the content as JSON-ready containers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Evidence:
        """Read what :meth:`to_dict` wrote."""
        operators = {
            op: OperatorEvidence(
                **{**entry, **{key: tuple(entry[key]) for key in ("available", "failed", "live")}}
            )
            for op, entry in content["operators"].items()
        }
        return cls(operators, dict(content["left"]))

    @property
    def usable(self) -> dict[str, tuple[str, ...]]:
        """Operator -> every implementation that may run, tried or not, the default first."""
        return {
            op: tuple(impl for impl in entry.available if impl not in entry.failed)
            for op, entry in self.operators.items()
        }

    @property
    def live(self) -> dict[str, tuple[str, ...]]:
        """Operator that is asked when the model is built -> what can be bound to it later."""
        return {op: entry.live for op, entry in self.operators.items() if entry.live}

    def space(self) -> Space:
        """Return what is left to try: operators with more than one choice."""
        wide = self.wide_space().choices
        choices = {
            op: tuple(impl for impl in impls if impl not in self.operators[op].excluded)
            for op, impls in wide.items()
        }
        return Space({op: impls for op, impls in choices.items() if len(impls) > 1})

    def wide_space(self) -> Space:
        """Return the space before choices were excluded."""
        return Space(
            {op: entry.available for op, entry in self.operators.items() if op not in self.left}
        )

    def predicted(self, configuration: Configuration) -> float:
        """Return the time that a configuration would take, the default's being 1.

        As if operators did not affect each other, from what each takes alone. Unknown is 1.
        """
        total = 1.0
        for op, impl in configuration.items():
            entry = self.operators[op]
            total += entry.share * (relative_time(entry, impl) - 1)
        return total


def relative_time(entry: OperatorEvidence, impl: str) -> float:
    """Return an implementation's time over the default's, weighted by the calls timed."""
    ours = defaults = 0.0
    for call, by_impl in entry.estimates().items():
        if impl in by_impl and entry.default in by_impl:
            number = entry.calls[call][0]
            ours += number * by_impl[impl].value
            defaults += number * by_impl[entry.default].value
    return ours / defaults if defaults else 1.0


def leave_at_default(evidence: Evidence, least_share: float, keep: Collection[str] = ()) -> None:
    """Leave operators at their default that shall be, have one choice, or take too little time."""
    for op, entry in evidence.operators.items():
        if op in keep:
            evidence.left[op] = "it was asked to be left"
        elif len(entry.available) < 2:
            evidence.left[op] = f"{entry.default} is the only implementation"
        elif op not in ASKED_ONCE and entry.share < least_share:
            evidence.left[op] = (
                f"it takes {100 * entry.share:.2g} % of the time, less than {100 * least_share:g} %"
            )


def exclude_dominated(entry: OperatorEvidence) -> None:
    """Exclude implementations that are surely slower than another one on every call timed.

    The default stays.
    """
    estimates = entry.estimates()
    if not estimates:
        return
    for impl in entry.available[1:]:
        timed = {call: by_impl for call, by_impl in estimates.items() if impl in by_impl}
        if not timed or impl in entry.excluded:
            continue
        rivals = [
            other
            for other in entry.available
            if other not in (impl, *entry.excluded)
            and all(
                other in by_impl and by_impl[impl].low > DOMINATED * by_impl[other].high
                for by_impl in timed.values()
            )
        ]
        if rivals:
            factor = min(by[impl].value / by[rivals[0]].value for by in timed.values())
            entry.excluded[impl] = (
                f"alone it takes {factor:.3g} times as long as {rivals[0]} or more"
            )
