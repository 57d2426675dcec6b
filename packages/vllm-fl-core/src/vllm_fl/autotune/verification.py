"""The winner in engines that run as they will serve, each started anew.

Trials run in an engine that is not compiled, and against the settings that are tuned. Where serving
compiles, the winner must be faster than the default there, too; and where other settings are tuned
than the platform's own, it is said how it compares with those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from vllm_fl.autotune.arena import Costs, EngineArena
from vllm_fl.autotune.objective import Objective
from vllm_fl.autotune.space import Configuration
from vllm_fl.autotune.supervisor import TrialFailed
from vllm_fl.dispatch import config, env
from vllm_fl.dispatch.settings import SETTINGS
from vllm_fl.dispatch.state import current_device

SETTING_VARIABLES = (env.CONFIG, *(setting.variable for setting in SETTINGS))
"""What an engine under the platform's own defaults does not see."""

RUNS = 3
"""Measured in each engine."""


@dataclass(frozen=True)
class Verification:
    """How to verify.

    Attributes:
        engine: makes an arena whose engines run as they will serve; the argument says whether
            under the platform's own defaults.
        objective: what is compared.
        starts: of engines, for each contender; 0 for no verification.
        spent: told what was spent.
    """

    engine: Callable[[bool], EngineArena]
    objective: Objective
    starts: int
    spent: Callable[[Costs], None]


def is_platform_s_own(settings: config.Config) -> bool:
    """Whether the settings are those that the platform has by itself."""
    device = current_device().device
    own = config.load(device.defaults if device is not None else None, environ={})
    return all(own[key] == value.value for key, value in settings.values.items())


def verify(
    how: Verification,
    winner: Configuration,
    default: Configuration | None,
    against_platform: bool,
) -> dict[str, Any]:
    """Compare the winner with the default, and with the platform's own defaults.

    Args:
        how: how to verify.
        winner: what is verified.
        default: the default; None where trials ran as it will serve.
        against_platform: whether to compare with the platform's own defaults.

    Returns:
        "text"; "accepted", false when it does not run or is not faster than the default in each
        pair of starts; "over_default" and "over_platform": ratios, one a pair of starts.
    """
    rivals: dict[str, Configuration | None] = {}
    if default is not None:
        rivals["over_default"] = default
    if against_platform:
        rivals["over_platform"] = None
    if not rivals or not how.starts:
        return {"accepted": True, "text": "trials" + (", not as it will serve" if default else "")}
    try:
        rates = _started_anew(how, {"winner": winner, **rivals})
    except TrialFailed as failure:
        return {"accepted": False, "text": f"it fails as it will serve: {failure}"}
    ratios = {
        name: [
            how.objective.ratio(ours, theirs)
            for ours, theirs in zip(rates["winner"], rates[name], strict=True)
        ]
        for name in rivals
    }
    words = {"over_default": "the default", "over_platform": "the platform's own defaults"}
    texts = [
        f"over {words[name]} {', '.join(f'{ratio:.4f}' for ratio in found)}"
        for name, found in ratios.items()
    ]
    return {
        "accepted": all(ratio > 1 for ratio in ratios.get("over_default", ())),
        "text": f"trials; and as it will serve, a ratio for each start: {'; '.join(texts)}",
        **ratios,
    }


def _started_anew(
    how: Verification, contenders: Mapping[str, Configuration | None]
) -> dict[str, list[dict[str, float]]]:
    """Return name -> median metrics by start; None stands for the platform's own defaults."""
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(how.starts):
        order = list(contenders.items())
        for name, configuration in order if number % 2 == 0 else reversed(order):
            arena = how.engine(configuration is None)
            try:
                arena.start(configuration)
                runs = [arena.measure(configuration or {}) for _ in range(RUNS)]
            finally:
                arena.stop()
                how.spent(arena.costs)
            rates[name].append({key: median(run[key] for run in runs) for key in runs[0]})
    return rates
