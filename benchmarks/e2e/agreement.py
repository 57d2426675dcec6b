"""Whether two engines generate the same tokens, and if not, whether a near-tie explains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

NEAR_TIE = 0.125
"""Log-probability between two candidates that rounding may exchange: logits of 4 to 8 in bf16 are
1/32 apart, and each of the two may be two steps off."""

GAPS = ("their_gap", "our_gap")

Tokens = Sequence[Sequence[int]]
Logprobs = Sequence[dict[str, float]]
Ask = Callable[[list[list[int]]], Logprobs]
"""Prompts -> for each, the log-probabilities of the most probable next tokens."""


def first_differences(ours: Tokens, theirs: Tokens) -> dict[int, int]:
    """Return request -> position of its first token that differs, for the requests that differ."""
    found = {}
    for request, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for position, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                found[request] = position
                break
    return found


def compare(
    prompts: Tokens, ours: Tokens, theirs: Tokens, ask_us: Ask, ask_them: Ask
) -> dict[str, Any]:
    """Compare what two engines generated for the same prompts.

    Where they part, both are asked for the next token after the text that they share.

    Returns:
        {"requests", "different": how many requests are, "first": the earliest divergence,
        "widest": the one whose candidates they see furthest apart, "unexplained": how many are
        no near-ties}, the last three only if some are different. A divergence is {"request",
        "position", "ours", "theirs": tokens, "their_gap", "our_gap": by how much an engine
        prefers its own token, None if the other is not among its candidates, "near_tie"}.
    """
    places = first_differences(ours, theirs)
    result: dict[str, Any] = {"requests": len(prompts), "different": len(places)}
    if not places:
        return result
    texts = [[*prompts[r], *theirs[r][:position]] for r, position in places.items()]
    found = []
    for (request, position), mine, other in zip(
        places.items(), ask_us(texts), ask_them(texts), strict=True
    ):
        a, b = ours[request][position], theirs[request][position]
        gaps = {"their_gap": gap(other, b, a), "our_gap": gap(mine, a, b)}
        near = all(value is not None and abs(value) <= NEAR_TIE for value in gaps.values())
        found.append(
            {"request": request, "position": position, "ours": a, "theirs": b, **gaps}
            | {"near_tie": near}
        )
    return result | {
        "first": min(found, key=lambda one: (one["position"], one["request"])),
        "widest": max(found, key=lambda one: _size(one["their_gap"])),
        "unexplained": sum(not one["near_tie"] for one in found),
    }


def gap(step: dict[str, float], token: int, other: int) -> float | None:
    """Return by how much ``token`` is more probable, as a difference of log-probabilities."""
    if str(token) in step and str(other) in step:
        return step[str(token)] - step[str(other)]
    return None


def _size(value: float | None) -> float:
    return float("inf") if value is None else abs(value)


def largest_error(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest difference of log-probabilities of tokens that both generated.

    Args:
        ours: an answer of an engine, with log-probabilities.
        theirs: the baseline's to the same prompts. Beyond a request's first difference the two
            continue different texts, which are not compared.
    """
    errors = [0.0]
    for mine, other, p, q in zip(
        ours["tokens"], theirs["tokens"], ours["logprobs"], theirs["logprobs"], strict=True
    ):
        for a, b, step, their_step in zip(mine, other, p, q, strict=True):
            if a != b:
                break
            errors.append(abs(step[str(a)] - their_step[str(b)]))
    return max(errors)


def describe(found: dict[str, Any]) -> str:
    """Return a comparison as text."""
    if not found["different"]:
        return "equal to the baseline"
    first, widest = found["first"], found["widest"]

    def gaps(one: dict[str, Any]) -> str:
        their, our = ("?" if one[key] is None else f"{one[key]:.3g}" for key in GAPS)
        return f"the baseline prefers its token by {their}, we ours by {our}"

    return (
        f"{found['different']} of {found['requests']} requests differ, first at position "
        f"{first['position']} of request {first['request']}: {first['ours']}, not "
        f"{first['theirs']} ({gaps(first)}); widest: {gaps(widest)}; no near-ties: "
        f"{found['unexplained']}"
    )
