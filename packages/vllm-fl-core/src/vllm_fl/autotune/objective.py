"""What is maximised: throughput, latency, or a weighted mix of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_fl.dispatch.errors import ConfigError, nearest

METRICS: Mapping[str, tuple[str, str, int]] = {
    "throughput": ("output_tokens_per_second", "output tokens/s", 1),
    "latency": ("latency_seconds", "s from a request's arrival to its end, median", -1),
    "ttft": ("first_token_seconds", "s from a request's arrival to its first token, median", -1),
}
"""Name -> key of a measurement, unit, and 1 when more is better, -1 when less is."""


@dataclass(frozen=True)
class Objective:
    """Weights of the metrics; they need not sum to one.

    Attributes:
        weights: name of a metric -> positive weight.
    """

    weights: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Parse ``"throughput"`` or ``"throughput=0.7,latency=0.3"``.

        Raises:
            ConfigError: a metric is unknown or given twice, or a weight is not positive.
        """
        weights: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = (piece.strip() for piece in part.partition("="))
            if name not in METRICS:
                raise ConfigError(f"Unknown objective {name!r}. {nearest(name, METRICS)}")
            try:
                weight = float(number or "1")
            except ValueError:
                weight = math.nan
            if name in weights or not 0 < weight < math.inf:
                raise ConfigError(
                    f"{text!r}: give each metric once with a positive weight, as in "
                    "'throughput=0.7,latency=0.3'."
                )
            weights[name] = weight
        return cls(weights)

    def ratio(self, candidate: Mapping[str, float], default: Mapping[str, float]) -> float:
        """Return how many times as good a measurement is: the weighted geometric mean."""
        total = sum(self.weights.values())
        logarithm = 0.0
        for name, weight in self.weights.items():
            key, _, sign = METRICS[name]
            logarithm += sign * weight / total * math.log(candidate[key] / default[key])
        return math.exp(logarithm)

    def __str__(self) -> str:
        if len(self.weights) == 1:
            return next(iter(self.weights))
        return ",".join(f"{name}={weight:g}" for name, weight in self.weights.items())
