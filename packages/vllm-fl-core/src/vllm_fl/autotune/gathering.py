"""Gathering the evidence from a live engine that runs eagerly."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_fl.autotune.arena import EngineArena
from vllm_fl.autotune.evidence import (
    Evidence,
    OperatorEvidence,
    exclude_dominated,
    leave_at_default,
    relative_time,
)
from vllm_fl.autotune.space import ASKED_ONCE, Configuration, orders, policy
from vllm_fl.autotune.supervisor import TrialFailed
from vllm_fl.dispatch.failure import is_out_of_memory
from vllm_fl.dispatch.phases import split_choice

TIMED_CALLS = 4
"""So many calls of an operator, those that take most of the time, are timed."""
SAMPLES = 15
SECONDS = 1.0
"""No further sample of one implementation on one call is taken after so long."""


@dataclass
class _Caller:
    """A choice that was checked.

    Attributes:
        op: the operator.
        impl: the choice.
        under: the choice, and those without which its operator is not called.
        called: the operators that are called under it and not under the default.
    """

    op: str
    impl: str
    under: dict[str, str]
    called: set[str] = field(default_factory=set)


@dataclass
class _Gathering:
    """What is known so far; the arguments are those of :func:`gather`."""

    arena: EngineArena
    least_share: float
    keep: Collection[str]
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        self.candidates: dict[str, Any] = self.arena.worker("fl_candidates")
        self.evidence = Evidence({})

    def record(self, operators: Collection[str] | None = None) -> None:
        """Record the workload as the engine is bound; add what is known of the operators called.

        Args:
            operators: only of these; None for all, and for those that are asked once.
        """
        arena = self.arena
        arena.worker("fl_record", {})
        seconds = arena.ask("serve", requests=arena.requests)["seconds"]
        calls = arena.worker("fl_recorded")
        for op in self.candidates if operators is None else operators:
            found = self.candidates[op]
            if found["available"] and (op in calls or (operators is None and op in ASKED_ONCE)):
                spent = sum(entry[1] for entry in calls.get(op, {}).values())
                entry = self.evidence.operators[op] = OperatorEvidence(
                    available=tuple(found["available"]),
                    share=spent / seconds,
                    calls=calls.get(op, {}),
                    live=tuple(found["live"]),
                    serves=found["serves"],
                )
                for choice in entry.available[1:]:
                    for impl in split_choice(op, choice).values():
                        if impl in found["unable"]:
                            why = f"{impl} cannot serve this model: {found['unable'][impl]}"
                            entry.exclude_failed(choice, why)
        leave_at_default(self.evidence, self.least_share, self.keep)
        arena.policy_of = policies(self.evidence, arena.facts["policy"])
        arena.live = self.evidence.live

    def leave_out_plain_engines(self) -> None:
        """Exclude plain PyTorch where it would need an engine of its own for each turn."""
        for op in ASKED_ONCE & self.evidence.operators.keys():
            entry = self.evidence.operators[op]
            for impl in self.candidates[op]["references"]:
                if impl not in (entry.default, *entry.live, *entry.excluded):
                    entry.excluded[impl] = "plain PyTorch, for which the engine would be restarted"

    def time(self, choices: Mapping[str, Sequence[str]], under: Configuration) -> None:
        """Time choices alone on the calls that take the most time.

        A choice that ends the engine is excluded, and a new engine times those that are left. Calls
        that cannot be kept together are kept for one operator after another. An operator whose
        calls cannot be kept even then is not timed, and neither is the default or what runs out of
        memory: those have served, or will be checked.

        Args:
            choices: operator -> implementations.
            under: the configuration in force, which calls the operators.

        Raises:
            TrialFailed: that configuration cannot be put in force.
        """
        left = {op: impls for op, impls in choices.items() if self.evidence.operators[op].calls}
        while left:
            self.arena.bind(under)
            try:
                self._keep_calls(left)
            except TrialFailed as failure:
                if len(left) > 1:
                    for op, impls in left.items():
                        self.time({op: impls}, under)
                else:
                    self.tell(f"{', '.join(left)} is not timed: {failure}")
                return
            left = self._time_until_the_end(left)

    def _keep_calls(self, operators: Collection[str]) -> None:
        """Run the workload and keep the arguments of the calls to be timed."""
        wanted = {op: self.evidence.operators[op].top_calls(TIMED_CALLS) for op in operators}
        self.arena.worker("fl_record", wanted)
        self.arena.ask("serve", requests=self.arena.requests)
        self.arena.worker("fl_recorded")

    def _time_until_the_end(self, choices: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """Time choices until one ends the engine; return those that are left."""
        left = dict(choices)
        for op, impls in choices.items():
            del left[op]
            for number, impl in enumerate(impls, 1):
                try:
                    self._time_choice(op, impl)
                except TrialFailed as failure:
                    entry = self.evidence.operators[op]
                    if impl == entry.default or is_out_of_memory(failure):
                        self.tell(f"{op}: {impl} is not timed: {failure}")
                    else:
                        entry.exclude_failed(impl, f"alone it failed: {failure}")
                    rest = impls[number:]
                    return {op: rest, **left} if rest else left
        self.arena.worker("fl_forget_recorded")
        return left

    def _time_choice(self, op: str, impl: str) -> None:
        self.tell(f"timing {op}: {impl}")
        entry = self.evidence.operators[op]
        for call in entry.top_calls(TIMED_CALLS):
            answer = self.arena.worker("fl_time", op, impl, call, SAMPLES, SECONDS)
            if "seconds" in answer:
                entry.timings.setdefault(call, {})[impl] = answer["seconds"]

    def check(self) -> None:
        """Check each choice alone: exclude what fails, generates something else, or is slow.

        A choice may call operators that the default does not call. They are recorded and timed
        under it, and their choices are checked under it.
        """
        evidence = self.evidence
        always, callers = set(evidence.operators), []
        waiting = deque(self._choices(evidence.space().choices, {}))
        while waiting:
            op, impl, under = waiting.popleft()
            caller = _Caller(op, impl, {**under, op: impl})
            self.tell(f"checking {op}: {impl}")
            try:
                called = self._called_under(caller.under)
                caller.called = called - always - caller.under.keys()
                added = self._add(caller)
            except TrialFailed as failure:
                evidence.operators[op].exclude_failed(impl, str(failure))
                continue
            waiting += self._choices(added, caller.under)
            callers.append(caller)
        for caller in callers:
            self._time_at_its_best(caller)
        for entry in evidence.operators.values():
            exclude_dominated(entry)
        tried = [c for c in callers if not self._is_excluded(c)]
        for op in evidence.operators.keys() - always.union(*(c.called for c in tried)):
            evidence.left[op] = "only choices that are not tried call it"

    def _add(self, caller: _Caller) -> dict[str, tuple[str, ...]]:
        """Record and time what nobody called before; return the choices of those operators."""
        new = sorted(caller.called - self.evidence.operators.keys())
        if not new:
            return {}
        self.tell(f"{caller.op}: {caller.impl} calls {', '.join(new)}, too")
        self.record(new)
        space = self.evidence.space()
        choices = {op: impls for op, impls in space.choices.items() if op in new}
        try:
            self.time(choices, {**space.default, **caller.under})
        except TrialFailed:
            for op in new:
                self.evidence.operators.pop(op, None)
                self.evidence.left.pop(op, None)
            raise
        return choices

    def _choices(
        self, choices: Mapping[str, Sequence[str]], under: dict[str, str]
    ) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Yield what is checked: operator, choice other than the default, and under what."""
        for op, impls in choices.items():
            for impl in impls[1:]:
                # Another one has its own trial, which needs another engine.
                if op not in ASKED_ONCE or impl in self.evidence.operators[op].live:
                    yield op, impl, under

    def _called_under(self, changes: Configuration) -> set[str]:
        """Check a configuration, all others at their default; return the operators called."""
        configuration = {**self.evidence.space().default, **changes}
        self.arena.bind(configuration)
        self.arena.worker("fl_called")
        self.arena.admit(configuration)
        return set(self.arena.worker("fl_called"))

    def _time_at_its_best(self, caller: _Caller) -> None:
        """Time a choice again with what is fastest, alone, of the operators that it calls."""
        space, operators = self.evidence.space(), self.evidence.operators
        best = {
            op: min(space.choices[op], key=lambda impl: relative_time(operators[op], impl))
            for op in caller.called
            if op in space.choices
        }
        if not space.changes(best) or self._is_excluded(caller):
            return
        try:
            self.time({caller.op: (caller.impl,)}, {**space.default, **caller.under, **best})
        except TrialFailed as failure:  # what is fast alone fails together: trials will show
            self.tell(f"{caller.op}: {caller.impl} is not timed again: {failure}")

    def _is_excluded(self, caller: _Caller) -> bool:
        operators = self.evidence.operators
        return any(impl in operators[op].excluded for op, impl in caller.under.items())


def gather(
    arena: EngineArena, least_share: float, keep: Collection[str], tell: Callable[[str], None]
) -> tuple[Evidence, dict[str, str]]:
    """Find what the model calls, time it, and check each choice alone.

    The arena's engine runs under the settings' own policy. Afterwards the arena has a reference.

    Args:
        arena: its engine runs eagerly.
        least_share: operators with a smaller share of the time are left at their default.
        keep: operators that are left at their default.
        tell: called with what happens, for people.

    Returns:
        The evidence, and the configuration that is the reference.

    Raises:
        TrialFailed: the default cannot run.
    """
    gathering = _Gathering(arena, least_share, keep, tell)
    evidence, candidates = gathering.evidence, gathering.candidates
    arena.ask("serve", requests=arena.requests)  # what is compiled at the first call is not timed
    gathering.record()
    gathering.leave_out_plain_engines()
    default = evidence.wide_space().default
    reference = {
        op: next((i for i in candidates[op]["references"] if i in impls), impls[0])
        for op, impls in evidence.wide_space().choices.items()
        if op not in ASKED_ONCE
    }
    arena.built_with(default)
    try:
        arena.set_reference({**default, **reference})
    except TrialFailed as failure:
        tell(f"the default is the reference: the reference implementations cannot run: {failure}")
        reference = {}
        arena.set_reference(default)
    gathering.time(evidence.space().choices, evidence.space().default)
    gathering.check()
    if arena.alive:
        arena.worker("fl_count_calls", False)
    return evidence, {**evidence.wide_space().default, **reference}


def policies(
    evidence: Evidence, base: Mapping[str, Any]
) -> Callable[[Configuration], dict[str, Any]]:
    """Return what makes the policy of a configuration out of the settings' own policy.

    The default of what is asked once is named, too, if it serves: it is what could, which need not
    be first in the settings' order.
    """
    space, usable = evidence.wide_space(), evidence.usable
    named = {op: entry.default for op, entry in evidence.operators.items() if entry.serves}
    return lambda configuration: policy(base, orders(space, usable, configuration, named))
