"""The kit's mixture-of-experts cases: right implementations pass, planted faults are found."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm_fl_reference")

from kit_runs import found, implementation, is_right, run  # noqa: E402
from torch.nn import functional  # noqa: E402

from vllm_fl_reference.ops import moe, routing  # noqa: E402

# -- topk_softmax


def forgets_to_write(weights, indices, places, gating, renormalize=False, /):
    fresh = [torch.empty_like(x) for x in (weights, indices, places)]
    return routing.topk_softmax(*fresh, gating, renormalize)


def no_token_expert_indices(weights, indices, places, gating, renormalize=False, /):
    return routing.topk_softmax(weights, indices, torch.empty_like(places), gating, renormalize)


def places_by_token(weights, indices, places, gating, renormalize=False, /):
    result = routing.topk_softmax(weights, indices, places, gating, renormalize)
    places.copy_(torch.arange(places.numel()).view(places.shape))
    return result


def softmax_after_the_choice(weights, indices, places, gating, renormalize=False, /):
    routing.topk_softmax(weights, indices, places, gating, renormalize)
    weights.copy_(gating.float().gather(1, indices.long()).softmax(-1))
    return weights, indices


def always_renormalises(weights, indices, places, gating, renormalize=False, /):
    return routing.topk_softmax(weights, indices, places, gating, True)


def never_renormalises(weights, indices, places, gating, renormalize=False, /):
    return routing.topk_softmax(weights, indices, places, gating)


def softmax_in_own_dtype(weights, indices, places, gating, renormalize=False, /):
    rounded = gating.softmax(-1).float().log()
    return routing.topk_softmax(weights, indices, places, rounded, renormalize)


def no_maximum_subtracted(weights, indices, places, gating, renormalize=False, /):
    routing.topk_softmax(weights, indices, places, gating, renormalize)
    odds = gating.float().exp()
    chosen = (odds / odds.sum(-1, keepdim=True)).gather(1, indices.long())
    weights.copy_(chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen)
    return weights, indices


def higher_index_wins(weights, indices, places, gating, renormalize=False, /):
    routing.topk_softmax(weights, indices, places, gating.flip(1), renormalize)
    indices.copy_(gating.shape[1] - 1 - indices)
    return weights, indices


def at_most_eight(weights, indices, places, gating, renormalize=False, /):
    k = min(8, weights.shape[1])
    parts = [x[:, :k] for x in (weights, indices, places)]
    routing.topk_softmax(*parts, gating, renormalize)
    return weights, indices


def at_most_256_experts(weights, indices, places, gating, renormalize=False, /):
    return routing.topk_softmax(weights, indices, places, gating[:, :256], renormalize)


def gating_overwritten(weights, indices, places, gating, renormalize=False, /):
    result = routing.topk_softmax(weights, indices, places, gating, renormalize)
    gating.sub_(gating.amax(-1, keepdim=True))
    return result


def ascending(weights, indices, places, gating, renormalize=False, /):
    routing.topk_softmax(weights, indices, places, gating, renormalize)
    weights.copy_(weights.flip(1))
    indices.copy_(indices.flip(1))
    return weights, indices


# -- grouped_topk


def grouped(scores, n_group, topk_group, topk, renormalize, factor, bias, scoring_func=0, **how):
    """The right thing, but for what ``how`` says."""
    plain = scores.float().sigmoid() if scoring_func else scores.float()
    ranked = plain if bias is None else plain + bias.float()
    groups = ranked.unflatten(1, (n_group, -1))
    best = groups.topk(how.get("best", 1 if bias is None else 2), dim=-1).values.sum(-1)
    _, chosen = routing._largest(best, how.get("groups", topk_group))
    outside = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
    allowed = groups.masked_fill(outside[..., None], how.get("fill", -torch.inf)).flatten(1)
    _, indices = routing._largest(allowed, topk)
    weights = how.get("weights", plain)
    weights = (ranked if weights is None else weights).gather(1, indices)
    if how.get("scale_first"):
        weights = weights * factor
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if not how.get("scale_first"):
        weights = weights * factor
    return weights, indices.to(how.get("dtype", torch.int32))


def planted(**how):
    def fn(
        scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func=0
    ):
        return grouped(
            scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias,
            scoring_func, **how,
        )  # fmt: skip

    return fn


def bias_ignored(
    scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func=0
):
    return grouped(
        scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, None, scoring_func
    )


def sigmoid_in_own_dtype(
    scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func=0
):
    scores = scores.sigmoid() if scoring_func else scores
    return grouped(scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias)


# -- moe_align_block_size


def align(change):
    """The right thing with its results changed by ``change(results, arguments)``."""

    def fn(
        topk_ids, block_size, num_experts, expert_map=None, pad_sorted_ids=False,
        ignore_invalid_experts=False,
    ):  # fmt: skip
        call = (topk_ids, block_size, num_experts, expert_map)
        call = (*call, pad_sorted_ids, ignore_invalid_experts)
        return change(moe.moe_align_block_size(*call), *call)

    return fn


def tail_of(results, value):
    ids, experts, used = results
    block = -(-len(ids) // max(len(experts), 1))
    experts[int(used) // block :] = value
    return ids, experts, used


def padding_is_minus_one(results, topk_ids, *rest):
    ids, experts, used = results
    return torch.where(ids == topk_ids.numel(), -1, ids), experts, used


def padded_to_the_used_part(results, *rest):
    ids, experts, used = results
    return ids[: int(used)], experts, used


def global_ids_kept(results, topk_ids, block, experts, expert_map, *flags):
    return moe.moe_align_block_size(topk_ids, block, experts, None, *flags)


def ignore_forgotten(results, topk_ids, block, experts, expert_map, pad, ignore):
    return moe.moe_align_block_size(topk_ids, block, experts, expert_map, pad, False)


def never_padded(results, topk_ids, block, experts, expert_map, pad, ignore):
    return moe.moe_align_block_size(topk_ids, block, experts, expert_map, False, ignore)


def experts_modulo_16(results, topk_ids, block, experts, *rest):
    return moe.moe_align_block_size(topk_ids % min(16, experts), block, experts, *rest)


def invalid_ids_wrap(results, topk_ids, block, experts, *rest):
    return moe.moe_align_block_size(topk_ids % experts, block, experts, *rest)


def one_expert_lost(results, topk_ids, block, experts, *rest):
    if experts != 257:
        return results
    kept = torch.where(topk_ids == 256, experts, topk_ids)
    return moe.moe_align_block_size(kept, block, experts, *rest)


def an_entry_twice(results, topk_ids, *rest):
    ids, experts, used = results
    if topk_ids.numel() > 1:
        first = (ids < topk_ids.numel()).nonzero()[:2, 0]
        ids[first[1]] = ids[first[0]]
    return ids, experts, used


def count_of_tokens(results, topk_ids, *rest):
    ids, experts, _ = results
    return ids, experts, torch.tensor([topk_ids.numel()], dtype=torch.int32)


def long_results(results, *rest):
    return tuple(result.long() for result in results)


def descending_positions(results, topk_ids, block, experts, *rest):
    """Right: the entries of an expert are in no order."""
    flipped = topk_ids.flatten().flip(0).view(topk_ids.shape)
    ids, labels, used = moe.moe_align_block_size(flipped, block, experts, *rest)
    count = topk_ids.numel()
    return torch.where(ids < count, count - 1 - ids, count), labels, used


# -- moe_sum


def sums_up(input, output):
    output.add_(input.sum(1))


def sums_the_first_two(input, output):
    output.copy_(input[:, :2].sum(1))


def averages(input, output):
    output.copy_(input.mean(1))


def returns_the_sum(input, output):
    return output.copy_(input.sum(1))


def strides_ignored(input, output):
    flat = torch.empty(input.shape, device="meta").stride()
    output.copy_(input.as_strided(input.shape, flat).sum(1))


def sums_in_place(input, output):
    output.copy_(input[:, 0].add_(input[:, 1:].sum(1)))


def sums_in_16_bits(input, output):
    """Right: rounding after each addition is within the tolerance."""
    output.zero_()
    for part in input.unbind(1):
        output.add_(part)


# -- fused_experts


def experts(change=lambda call: {}):
    """The right thing with the arguments that ``change(arguments)`` returns changed."""

    def fn(
        hidden_states, w1, w2, topk_weights, topk_ids, activation="silu",
        apply_router_weight_on_input=False, global_num_experts=-1, expert_map=None,
    ):  # fmt: skip
        call = {
            "hidden_states": hidden_states, "w1": w1, "w2": w2, "topk_weights": topk_weights,
            "topk_ids": topk_ids, "activation": activation,
            "apply_router_weight_on_input": apply_router_weight_on_input,
            "global_num_experts": global_num_experts, "expert_map": expert_map,
        }  # fmt: skip
        return moe.fused_experts(**{**call, **change(call)})

    return fn


def swapped_halves(call):
    return {"w1": call["w1"].roll(call["w1"].shape[1] // 2, dims=1)}


def unmapped(call):
    ids = call["topk_ids"].clamp(0, len(call["w1"]) - 1)
    return {"expert_map": None, "global_num_experts": -1, "topk_ids": ids}


def clamped_ids(call):
    experts = call["global_num_experts"]
    return {
        "topk_ids": call["topk_ids"].clamp(0, (len(call["w1"]) if experts < 0 else experts) - 1)
    }


def first_choice_only(call):
    return {"topk_ids": call["topk_ids"][:, :1], "topk_weights": call["topk_weights"][:, :1]}


def local_range(call):
    ids = torch.where(call["topk_ids"] < len(call["w1"]), call["topk_ids"], -1)
    return {"topk_ids": ids}


def tanh_gelu(*call, **named):
    def approximate(x):
        gate, up = x.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up

    before = moe.ACTIVATIONS["gelu"]
    moe.ACTIVATIONS["gelu"] = approximate
    try:
        return moe.fused_experts(*call, **named)
    finally:
        moe.ACTIVATIONS["gelu"] = before


def silu_for_all(call):
    return {"activation": "silu"}


def adds_to_the_input(*call, **named):
    return call[0].copy_(moe.fused_experts(*call, **named))


FAULTS = [
    *(
        ("topk_softmax", fn, "*")
        for fn in (
            forgets_to_write, no_token_expert_indices, places_by_token, softmax_after_the_choice,
            always_renormalises, never_renormalises, softmax_in_own_dtype, no_maximum_subtracted,
            higher_index_wins, at_most_eight, at_most_256_experts, ascending,
        )
    ),
    ("topk_softmax", gating_overwritten, "*/contract/*"),
    *(
        ("grouped_topk", fn, "*")
        for fn in (
            planted(best=1), planted(best=2), planted(groups=1), planted(fill=0.0),
            planted(weights=None), planted(scale_first=True), planted(dtype=torch.int64),
            bias_ignored, sigmoid_in_own_dtype,
        )
    ),
    *(
        ("moe_align_block_size", align(change), "*")
        for change in (
            lambda results, *rest: tail_of(results, 0), padding_is_minus_one,
            padded_to_the_used_part, global_ids_kept, ignore_forgotten, never_padded,
            experts_modulo_16, invalid_ids_wrap, one_expert_lost, an_entry_twice, count_of_tokens,
        )
    ),
    ("moe_align_block_size", align(long_results), "*/contract/*"),
    *(
        ("moe_sum", fn, "*")
        for fn in (sums_up, sums_the_first_two, averages, returns_the_sum, strides_ignored)
    ),
    ("moe_sum", sums_in_place, "*/contract/*"),
    *(
        ("fused_experts", experts(change), "*")
        for change in (
            swapped_halves, unmapped, clamped_ids, first_choice_only, local_range, silu_for_all,
            lambda call: {"apply_router_weight_on_input": False},
            lambda call: {"apply_router_weight_on_input": True},
            lambda call: {"topk_weights": torch.ones_like(call["topk_weights"])},
            lambda call: {"topk_weights": functional.normalize(call["topk_weights"], p=1, dim=1)},
        )
    ),
    ("fused_experts", experts(silu_for_all), "*/refusal/*"),
    ("fused_experts", tanh_gelu, "*/values/float32-*gelu*"),
    ("fused_experts", adds_to_the_input, "*/contract/*"),
]  # fmt: skip


@pytest.mark.parametrize(("op_name", "fn", "pattern"), FAULTS)
def test_a_planted_fault_is_found(op_name: str, fn: Any, pattern: str) -> None:
    ended = run(implementation(op_name, fn, traceable=False), pattern)
    assert found(ended), ended


RIGHT = [
    ("grouped_topk", planted()),
    ("moe_align_block_size", align(lambda results, *rest: results)),
    ("moe_align_block_size", align(descending_positions)),
    ("moe_sum", sums_in_16_bits),
    ("fused_experts", experts()),
]


@pytest.mark.parametrize(("op_name", "fn"), RIGHT)
def test_other_ways_to_be_right_pass(op_name: str, fn: Any) -> None:
    ended = run(implementation(op_name, fn, traceable=False))
    assert is_right(ended), ended
