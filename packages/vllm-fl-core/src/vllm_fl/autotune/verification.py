"""The winner in engines that run as they will serve, each started anew.

Trials run in an engine that is not compiled, and against the settings that are tuned. Where serving
compiles, the winner must be faster than the default there, too; and where other settings are tuned
than the platform's own, it is said how it compares with those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from vllm_fl.autotune.arena import Costs, EngineArena
from vllm_fl.autotune.measuring import finite
from vllm_fl.autotune.objective import Objective
from vllm_fl.autotune.space import Configuration
from vllm_fl.autotune.statistics import widest_estimate
from vllm_fl.autotune.supervisor import TrialFailed
from vllm_fl.dispatch import config, env
from vllm_fl.dispatch.settings import SETTINGS
from vllm_fl.dispatch.state import current_device

SETTING_VARIABLES = (env.CONFIG, *(setting.variable for setting in SETTINGS))
"""What an engine under the platform's own defaults does not see."""

RUNS = 3
"""Measured in each engine."""

NAMES = {"over_default": "the default", "over_platform": "what the platform's own defaults choose"}
"""Whom the winner is compared with."""


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
        pair of starts; "over_default": ratios, one a pair of starts; "against_platform": an
        estimate from all pairs of runs; or instead "same_as_platform", true, where the platform's
        own defaults build the same model and nothing is compared. "failed": who else does not run,
        and is not compared -> why.
    """
    rivals: dict[str, Configuration | None] = {}
    if default is not None:
        rivals["over_default"] = default
    if against_platform:
        rivals["over_platform"] = None
    if not rivals or not how.starts:
        return {"accepted": True, "text": "trials" + (", not as it will serve" if default else "")}
    try:
        runs, failed = _started_anew(how, {"winner": winner, **rivals})
    except TrialFailed as failure:
        return {"accepted": False, "text": f"it fails as it will serve: {failure}"}
    found: dict[str, Any] = {"accepted": True}
    texts = []
    if failed:
        found["failed"] = {NAMES[name]: reason for name, reason in failed.items()}
        texts += [f"{who} failed and is not compared" for who in found["failed"]]
    if "over_default" in runs:
        ratios = [
            how.objective.ratio(_medians(ours), _medians(theirs))
            for ours, theirs in zip(runs["winner"], runs["over_default"], strict=True)
        ]
        found |= {"accepted": all(ratio > 1 for ratio in ratios), "over_default": ratios}
        listed = ", ".join(f"{ratio:.4f}" for ratio in ratios)
        texts.append(f"as it will serve, a ratio over the default for each start: {listed}")
    if "over_platform" in runs:
        pairs = [
            how.objective.ratio(our, their)
            for ours, theirs in zip(runs["winner"], runs["over_platform"], strict=True)
            for our, their in zip(ours, theirs, strict=True)
        ]
        estimate = widest_estimate(pairs)
        found["against_platform"] = finite(asdict(estimate))
        texts.append(f"over the platform's own defaults {estimate}")
    elif "over_platform" in rivals.keys() - failed:
        found["same_as_platform"] = True
        texts.append("it is what the platform's own defaults choose")
    return {**found, "text": "; ".join(("trials", *texts))}


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: median(run[key] for run in runs) for key in runs[0]}


def _started_anew(
    how: Verification, contenders: Mapping[str, Configuration | None]
) -> tuple[dict[str, list[list[Mapping[str, float]]]], dict[str, str]]:
    """Return name -> the runs of each start, and name -> why it failed and is left out.

    None stands for the platform's own defaults. Those, the last, are left out, too, where they
    build the same model as the winner, the first.

    Raises:
        TrialFailed: the winner does not run.
    """
    runs: dict[str, list[list[Mapping[str, float]]]] = {name: [] for name in contenders}
    used: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for number in range(how.starts):
        order = list(contenders.items())
        for name, configuration in order if number % 2 == 0 else reversed(order):
            if name not in runs or len(runs) == 1:
                continue
            arena = how.engine(configuration is None)
            try:
                arena.start(configuration)
                used[name] = arena.worker("fl_used")
                if configuration is None and used[name] == used["winner"]:
                    del runs[name]
                    continue
                runs[name].append([arena.measure(configuration or {}) for _ in range(RUNS)])
            except TrialFailed as failure:
                if name == "winner":
                    raise
                failed[name] = str(failure)
                del runs[name]
            finally:
                arena.stop()
                how.spent(arena.costs)
    return runs, failed
