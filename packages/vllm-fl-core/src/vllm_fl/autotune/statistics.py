"""Intervals without assumptions on the distribution, and when a gain counts. Pure.

What is compared are ratios of two runs that took turns, so that a slow spell of the machine meets
both. Their logarithms are symmetric about zero when the two runs are of the same thing, which is
all that Wilcoxon's signed-rank interval needs (Hollander and Wolfe, Nonparametric Statistical
Methods, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from vllm_fl.dispatch.types import YES, Decision

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A central value with its interval.

    Attributes:
        value: the Hodges-Lehmann estimate of a ratio, or the median.
        low: lower end of the interval; 0 when there are too few values for the level.
        high: upper end; infinity when there are too few.
        level: the level of confidence that was asked for.
        count: how many values it is made from.
    """

    value: float
    low: float
    high: float
    level: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def walsh_averages(values: Sequence[float]) -> list[float]:
    """Return the means of all pairs, each value paired with itself, too; ascending."""
    return sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])


def signed_rank_index(count: int, level: float) -> int:
    """Return C: the C-th lowest and C-th highest Walsh average bound an interval of ``level``.

    0 when even the widest interval of so many values has a lower level. Exact.
    """
    ways = [1]  # ways[w]: subsets of the ranks 1..n with sum w
    for rank in range(1, count + 1):
        longer = ways + [0] * rank
        for total, number in enumerate(ways):
            longer[total + rank] += number
        ways = longer
    allowed = (1 - level) / 2 * 2**count * (1 + 1e-9)
    index, tail = 0, 0
    for number in ways:
        tail += number
        if tail > allowed:
            break
        index += 1
    return index


def ratio_estimate(ratios: Sequence[float], level: float = LEVEL) -> Estimate:
    """Estimate the ratio of two things that were measured in turns.

    Args:
        ratios: positive, one for each turn.
        level: of confidence.
    """
    averages = walsh_averages([math.log(ratio) for ratio in ratios])
    index = signed_rank_index(len(ratios), level)
    low, high = (averages[index - 1], averages[-index]) if index else (-math.inf, math.inf)
    return Estimate(math.exp(median(averages)), math.exp(low), math.exp(high), level, len(ratios))


def widest_estimate(ratios: Sequence[float], level: float = LEVEL) -> Estimate:
    """As :func:`ratio_estimate`, at the highest level up to ``level`` that so many values allow.

    For display: its ``level`` says what the interval is worth.
    """
    attainable = 1 - 2 / 2 ** len(ratios)
    return ratio_estimate(ratios, min(level, attainable))


def median_estimate(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """Estimate a median from order statistics, at the highest level that the count allows."""
    ordered, count = sorted(values), len(values)
    index, tail = 0, 0.0
    while index < (count + 1) // 2 - 1:
        tail += math.comb(count, index) / 2**count
        if 2 * (tail + math.comb(count, index + 1) / 2**count) > 1 - level:
            break
        index += 1
    reached = 1 - 2 * sum(math.comb(count, i) for i in range(index + 1)) / 2**count
    low, high = ordered[index], ordered[count - 1 - index]
    return Estimate(median(ordered), low, high, max(0.0, reached), count)


def is_gain(gain: Estimate, noise: Estimate) -> Decision:
    """Whether a candidate beats the default by more than the measured noise.

    Args:
        gain: candidate over default.
        noise: default over default, measured in the same run.
    """
    margin = max(noise.high, 1 / noise.low if noise.low > 0 else math.inf)
    if gain.low > margin:
        return YES
    if gain.low <= 1 <= gain.high:
        return Decision.no(f"the interval {gain} of the gain contains 1")
    if gain.high < 1:
        return Decision.no(f"it is slower: {gain}")
    return Decision.no(f"the gain {gain} is not above the noise, {margin:.4g}")
