"""Whether a configuration generates what the reference does. Pure.

Prompts are scored token by token and continued greedily. Log-probabilities of the prompt and of
the common beginning of the continuations may differ by no more than a tolerance. Where the
continuations part, the reference must have been undecided: its log-probabilities of the two tokens
may differ by no more than the tolerance for one value. What follows belongs to different texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vllm_fl.dispatch.types import YES, Decision

MEAN_TOLERANCE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.05}
"""Dtype of the model -> allowed mean difference, in nats."""
WORST = 10
"""One value may differ by so many times the allowed mean."""


@dataclass(frozen=True)
class Continuation:
    """What was generated for one prompt; ``vars`` of it are JSON-ready.

    Attributes:
        prompt: log-probability of each token of the prompt but the first.
        tokens: the continuation.
        steps: for each token of it, token -> log-probability of the likeliest ones.
    """

    prompt: tuple[float, ...]
    tokens: tuple[int, ...]
    steps: tuple[dict[int, float], ...]

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Continuation:
        """Read what an engine answers, or what was kept; JSON has made the tokens text."""
        steps = ({int(t): value for t, value in step.items()} for step in content["steps"])
        return cls(tuple(content["prompt"]), tuple(content["tokens"]), tuple(steps))


def agree(
    candidate: Sequence[Continuation], reference: Sequence[Continuation], tolerance: float
) -> Decision:
    """Compare continuations of the same prompts.

    Args:
        candidate: of the configuration in question.
        reference: of the reference.
        tolerance: allowed mean difference of log-probabilities, in nats.
    """
    differences = []
    for number, (ours, theirs) in enumerate(zip(candidate, reference, strict=True)):
        differences += [abs(a - b) for a, b in zip(ours.prompt, theirs.prompt, strict=True)]
        for place, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
            step = theirs.steps[place]
            if a != b:
                gap = step[b] - step.get(a, -math.inf)
                if not gap <= WORST * tolerance:
                    return Decision.no(
                        f"prompt {number}: token {place} is {a}, the reference's is {b} and by "
                        f"{gap:.3g} nats likelier (allowed: {WORST * tolerance:.3g})"
                    )
                break
            differences.append(abs(ours.steps[place][a] - step[b]))
    worst, mean = max(differences), fmean(differences)
    if not worst <= WORST * tolerance:  # also when it is not a number
        return Decision.no(
            f"a log-probability differs by {worst:.3g} nats (allowed: {WORST * tolerance:.3g})"
        )
    if not mean <= tolerance:
        return Decision.no(
            f"log-probabilities differ by {mean:.3g} nats on average (allowed: {tolerance:.3g})"
        )
    return YES
