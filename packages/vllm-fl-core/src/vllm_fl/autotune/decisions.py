"""What was decided about candidates, kept in the study for whoever continues it or joins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
from optuna.trial import FrozenTrial


def keep(study: optuna.Study, trial: FrozenTrial, found: Mapping[str, Any]) -> None:
    """Keep what the confirmation of a trial's configuration has found so far."""
    study.set_user_attr(_key(trial), dict(found))


def kept(study: optuna.Study, trial: FrozenTrial) -> dict[str, Any] | None:
    """Return what :func:`keep` was given last; None before anything was decided."""
    found: dict[str, Any] | None = study.user_attrs.get(_key(trial))
    return found


def is_refuted(found: Mapping[str, Any]) -> bool:
    """Whether a candidate failed, did not beat the default, or was not accepted as it will serve.

    Args:
        found: what its confirmation has found so far; without "verification" that is still to come.
    """
    if "failure" in found or not found["decision"]["accepted"]:
        return True
    return "verification" in found and not found["verification"]["accepted"]


def _key(trial: FrozenTrial) -> str:
    return f"confirmation {trial.number}"  # a trial that is over takes no attributes
