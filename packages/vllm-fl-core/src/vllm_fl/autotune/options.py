"""What a tuner is told, and what it tells while it works."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_fl.dispatch.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """What to tune, and how long.

    Attributes:
        model: the model, as for vLLM.
        workload: a preset's name or a file; see ``workload``.
        objective: see ``objective``.
        trials: end-to-end trials at most, those of all processes and resumptions together.
        seconds: the time budget of this process; None for none.
        storage: URL of the study's storage.
        resume: continue the study that the storage holds, or join those who run it.
        engine: more arguments of vLLM's ``LLM``.
        keep: operators that are left at their default.
        least_share: operators with a smaller share of the time are left at their default.
        tolerance: allowed mean difference of log-probabilities in nats; None for the dtype's.
        trial_seconds: after so long without an answer an engine is taken for hung.
        verify_starts: starts of engines, of each kind, that verify the winner where serving is
            other than trials are, or the settings are other than the platform's own.
        seed: of the sampler.

    Raises:
        ConfigError: a number is not allowed.
    """

    model: str
    workload: str = "chat"
    objective: str = "throughput"
    trials: int = 40
    seconds: float | None = None
    storage: str = "sqlite:///vllm-fl-autotune.db"
    resume: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    least_share: float = 0.005
    tolerance: float | None = None
    trial_seconds: float = 600.0
    verify_starts: int = 2
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check_count("trials", 1)
        self._check_count("verify_starts", 0)
        if self.seed is not None:
            self._check_count("seed", 0, 2**32 - 1)
        for name in ("seconds", "trial_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value!r}; it must be more than 0.")
        if not 0 <= self.least_share <= 1:
            raise ConfigError(f"least_share is {self.least_share!r}; it must be from 0 to 1.")
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise ConfigError(f"tolerance is {self.tolerance!r}; it must be a number from 0.")

    def _check_count(self, name: str, least: int, most: float = math.inf) -> None:
        value = getattr(self, name)
        if not (isinstance(value, int) and least <= value <= most):
            up_to = "" if most == math.inf else f" to {most}"
            raise ConfigError(
                f"{name} is {value!r}; it must be a whole number from {least}{up_to}."
            )


@dataclass(frozen=True)
class Progress:
    """How far tuning is.

    Attributes:
        done: trials that are over.
        trials: trials at most.
        best: how many times as good as the default the best one so far is; None before it.
        name: the best configuration's changes.
        seconds_left: of the time budget; None without one.
    """

    done: int
    trials: int
    best: float | None
    name: str
    seconds_left: float | None
