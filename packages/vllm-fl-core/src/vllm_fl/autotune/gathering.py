"""Gathering the evidence from a live engine that runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from vllm_fl.autotune.arena import EngineArena
from vllm_fl.autotune.evidence import (
    Evidence,
    OperatorEvidence,
    exclude_dominated,
    leave_at_default,
)
from vllm_fl.autotune.space import ASKED_ONCE, Configuration, orders, policy
from vllm_fl.autotune.supervisor import TrialFailed

TIMED_CALLS = 4
"""So many calls of an operator, those that take most of the time, are timed."""
SAMPLES = 15
SECONDS = 1.0
"""No further sample of one implementation on one call is taken after so long."""


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
    candidates = arena.worker("fl_candidates")
    arena.ask("serve", requests=arena.requests)  # what is compiled at the first call is not timed
    arena.worker("fl_record", {})
    seconds = arena.ask("serve", requests=arena.requests)["seconds"]
    calls = arena.worker("fl_recorded")
    operators = {}
    for op, found in candidates.items():
        if found["available"] and (op in calls or op in ASKED_ONCE):
            spent = sum(entry[1] for entry in calls.get(op, {}).values())
            operators[op] = OperatorEvidence(
                available=tuple(found["available"]),
                share=spent / seconds,
                calls=calls.get(op, {}),
                live=tuple(found["live"]),
            )
    evidence = Evidence(operators)
    leave_at_default(evidence, least_share, keep)
    arena.policy_of, arena.live = policies(evidence, arena.facts["policy"]), evidence.live
    reference = {
        op: next((i for i in candidates[op]["references"] if i in impls), impls[0])
        for op, impls in evidence.wide_space().choices.items()
        if op not in ASKED_ONCE
    }
    default = evidence.wide_space().default
    arena.built_with(default)
    try:
        arena.set_reference({**default, **reference})
    except TrialFailed as failure:
        tell(f"the default is the reference: the reference implementations cannot run: {failure}")
        reference = {}
        arena.set_reference(default)
    _time(arena, evidence, tell)
    _check_choices(arena, evidence, tell)
    for entry in operators.values():
        exclude_dominated(entry)
    return evidence, {**default, **reference}


def policies(
    evidence: Evidence, base: Mapping[str, Any]
) -> Callable[[Configuration], dict[str, Any]]:
    """Return what makes the policy of a configuration out of the settings' own policy.

    The default of what is asked once is named, too: it is what could serve, which need not be
    first in the settings' order.
    """
    space, available, named = evidence.wide_space(), evidence.available, evidence.live
    return lambda configuration: policy(base, orders(space, available, configuration, named))


def _time(arena: EngineArena, evidence: Evidence, tell: Callable[[str], None]) -> None:
    """Time every choice alone on the calls that take the most time.

    A choice that ends the engine is excluded, and a new engine times those that are left.
    """
    recorded = False
    for op, impls in evidence.space().choices.items():
        entry = evidence.operators[op]
        for impl in impls:
            for call in entry.top_calls(TIMED_CALLS):
                if not recorded or not arena.alive:
                    _keep_calls(arena, evidence)
                    recorded = True
                tell(f"timing {op}: {impl}")
                try:
                    answer = arena.worker("fl_time", op, impl, call, SAMPLES, SECONDS)
                except TrialFailed as failure:
                    if impl == entry.default:
                        raise
                    entry.excluded[impl] = f"alone it failed: {failure}"
                    break
                if "seconds" in answer:
                    entry.timings.setdefault(call, {})[impl] = answer["seconds"]
    if arena.alive and recorded:
        arena.worker("fl_forget_recorded")


def _keep_calls(arena: EngineArena, evidence: Evidence) -> None:
    """Run the workload under the default and keep the arguments of the calls to be timed."""
    space = evidence.space()
    wanted = {op: evidence.operators[op].top_calls(TIMED_CALLS) for op in space.choices}
    arena.bind(space.default)
    arena.worker("fl_record", wanted)
    arena.ask("serve", requests=arena.requests)
    arena.worker("fl_recorded")


def _check_choices(arena: EngineArena, evidence: Evidence, tell: Callable[[str], None]) -> None:
    """Exclude choices that, all others at their default, fail or generate something else."""
    space = evidence.space()
    for op, impls in space.choices.items():
        for impl in impls[1:]:
            if op in ASKED_ONCE and impl not in evidence.operators[op].live:
                continue  # in its own trial, which needs another engine
            tell(f"checking {op}: {impl}")
            try:
                arena.admit({**space.default, op: impl})
            except TrialFailed as failure:
                evidence.operators[op].excluded[impl] = str(failure)
