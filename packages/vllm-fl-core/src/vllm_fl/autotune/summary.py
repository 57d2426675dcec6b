"""Everything that is known about a study, as data for reports."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import optuna

from vllm_fl.autotune.evidence import Evidence


def summary(study: optuna.Study, storage: str, interrupted: bool, undecided: str) -> dict[str, Any]:
    """Return everything that is known about the study, JSON-ready, for reports.

    Args:
        study: the study.
        storage: its URL.
        interrupted: whether Ctrl-C ended the work.
        undecided: why the time ended the work before a decision; "" if it did not.
    """
    attributes = study.user_attrs
    evidence = Evidence.from_dict(attributes.get("evidence", {"operators": {}, "left": {}}))
    space = evidence.space()
    trials = []
    for trial in study.get_trials(deepcopy=False):
        if trial.params and (trial.value is not None or "failure" in trial.user_attrs):
            known = all(trial.params.get(op) in impls for op, impls in space.choices.items())
            trials.append(
                {
                    "number": trial.number,
                    "name": space.name(trial.params) if known else str(trial.params),
                    "value": trial.value,
                    **trial.user_attrs,
                }
            )
    return {
        "study": study.study_name,
        "storage": storage,
        "interrupted": interrupted,
        "undecided": undecided,
        "space": dict(space.choices),
        "size": space.size if space.choices else 0,
        "evidence": evidence.to_dict(),
        "trials": trials,
        **{
            key: attributes.get(key)
            for key in ("facts", "workload", "objective", "reference", "costs", "result")
        },
        "rate": rate(attributes.get("costs") or {}, trials),
    }


def rate(costs: Mapping[str, Any], trials: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return trials per minute as they were, and as they would be with a start for each bind."""
    seconds = [trial["seconds"] for trial in trials if "seconds" in trial]
    starts, rebinds = costs.get("starts") or [], costs.get("rebinds") or []
    if not seconds or not starts or not rebinds:
        return None
    live = statistics.median(seconds)
    # A trial that restarts needs two engines, the default's and the candidate's, started once each.
    restarting = live + 2 * statistics.median(starts)
    return {"live": 60 / live, "restarting": 60 / restarting}
