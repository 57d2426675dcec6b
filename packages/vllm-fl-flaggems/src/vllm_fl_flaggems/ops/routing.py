"""topk_softmax and grouped_topk."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vllm_fl_flaggems.kernels import grouped, topk
from vllm_fl_flaggems.moe_tiles import MAX_EXPERTS, grouped_tile, topk_tile
from vllm_fl_flaggems.ops.layout import refusal
from vllm_fl_flaggems.ops.library import define

_INDICES = (torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def supports_topk(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> object:
    """Say whether ``topk_softmax`` takes these arguments."""
    reason = _scores_refusal(gating_output)
    if reason:
        return f"gating_output: {reason}"
    if topk_weights.dim() != 2:
        return f"topk_weights has rank {topk_weights.dim()}, not [tokens, k]"
    tokens, experts = gating_output.shape
    k = topk_weights.shape[1]
    if not 1 <= k <= experts:
        return f"k is {k}, not between 1 and {experts} experts"
    for name, output, dtypes in (
        ("topk_weights", topk_weights, (torch.float32,)),
        ("topk_indices", topk_indices, _INDICES),
        ("token_expert_indices", token_expert_indices, (torch.int32,)),
    ):
        if output.dtype not in dtypes:
            return f"{name} has dtype {output.dtype}"
        if output.shape[0] != tokens or output.shape[1] != k or not output.is_contiguous():
            return f"{name} is not a contiguous matrix of {tokens} x {k}"
    return True


def supports_grouped(
    scores: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor | None,
    scoring_func: int = 0,
) -> object:
    """Say whether ``grouped_topk`` takes these arguments."""
    reason = _scores_refusal(scores)
    if reason:
        return f"scores: {reason}"
    experts = scores.shape[1]
    if n_group < 1 or experts % n_group or experts < 2 * n_group:
        return f"{experts} experts do not make {n_group} equal groups of two or more"
    if not (1 <= topk_group <= n_group and 1 <= topk <= topk_group * (experts // n_group)):
        return f"{topk} experts of {topk_group} groups cannot be chosen from {n_group} groups"
    if scoring_func not in (0, 1):
        return f"scoring_func={scoring_func} is neither 0 nor 1"
    if bias is None:
        return True
    if bias.dim() != 1 or bias.shape[0] != experts or bias.stride(0) != 1:
        return f"the bias is not a contiguous vector of {experts} elements"
    if bias.dtype not in _FLOATS:
        return f"the bias has dtype {bias.dtype}"
    return True


def _scores_refusal(scores: Tensor) -> str:
    reason = refusal(scores)
    if reason:
        return reason
    if scores.dim() != 2:
        return f"rank {scores.dim()}, not [tokens, experts]"
    if scores.dtype not in _FLOATS:
        return f"dtype {scores.dtype}"
    if not 1 <= scores.shape[1] <= MAX_EXPERTS:
        return f"{scores.shape[1]} experts are not between 1 and {MAX_EXPERTS}"
    return ""


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose the k experts of each token with the largest softmax probabilities.

    The softmax is fp32 and over all experts. Of equal logits the lower expert comes first
    (vLLM ``ops.topk_softmax``).

    Args:
        topk_weights: ``[tokens, k]`` fp32, contiguous; overwritten, in descending order.
        topk_indices: likewise, int32 or int64; overwritten.
        token_expert_indices: likewise, int32; overwritten by ``j * tokens + t`` at ``[t, j]``.
        gating_output: ``[tokens, experts]``, fp16, bf16 or fp32, the last dimension contiguous;
            at most 4096 experts; not modified.
        renormalize: whether to divide the weights by their sum.

    Returns:
        ``(topk_weights, topk_indices)``, the arguments.
    """
    if is_compiling():
        wide = topk_indices.dtype == torch.int64
        weights, indices, places = torch.ops.vllm_fl_flaggems.topk_softmax(
            gating_output, topk_weights.shape[1], wide, renormalize
        )
        topk_weights.copy_(weights)
        topk_indices.copy_(indices)
        token_expert_indices.copy_(places)
        return topk_weights, topk_indices
    _choose(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize)
    return topk_weights, topk_indices


def _choose(
    weights: Tensor, indices: Tensor, places: Tensor, logits: Tensor, renormalize: bool
) -> None:
    tokens, experts = logits.shape
    if tokens:
        tile = topk_tile(tokens, experts, weights.shape[1])
        topk.topk_softmax(weights, indices, places, logits, renormalize, tile)


def grouped_topk(
    scores: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor | None,
    scoring_func: int = 0,
) -> tuple[Tensor, Tensor]:
    """Choose the best experts of each token among those of its best expert groups.

    Everything is fp32. Experts are chosen by score plus bias and weighted by the score alone
    (vLLM ``ops.grouped_topk``; DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    Args:
        scores: ``[tokens, experts]``, fp16, bf16 or fp32, the last dimension contiguous; at most
            4096 experts; not modified.
        n_group: groups of neighbouring experts, of two or more each.
        topk_group: how many groups are chosen: by the sum of their two best experts when there is
            a bias, by their best expert when there is none.
        topk: how many experts of these groups are chosen.
        renormalize: whether to divide the weights by their sum.
        routed_scaling_factor: multiplies the weights in the end.
        bias: ``[experts]``, contiguous, fp16, bf16 or fp32; or None.
        scoring_func: 0 for the scores as they are, 1 for their sigmoid.

    Returns:
        New ``(weights [tokens, topk] fp32, indices [tokens, topk] int32)``, in descending order of
        score plus bias.
    """
    arguments = (
        scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func
    )  # fmt: skip
    if is_compiling():
        return torch.ops.vllm_fl_flaggems.grouped_topk(*arguments)
    return _grouped(*arguments)


def _grouped(
    scores: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor | None,
    scoring_func: int,
) -> tuple[Tensor, Tensor]:
    tokens, experts = scores.shape
    weights = scores.new_empty((tokens, topk), dtype=torch.float32)
    indices = scores.new_empty((tokens, topk), dtype=torch.int32)
    if tokens:
        grouped.grouped_topk(
            weights,
            indices,
            scores,
            bias,
            (n_group, topk_group),
            scoring_func == 1,
            renormalize,
            routed_scaling_factor,
            grouped_tile(experts, n_group, topk, tokens),
        )
    return weights, indices


def _functional_topk(
    gating_output: Tensor, k: int, wide: bool, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    outs = _fake_topk(gating_output, k, wide, renormalize)
    _choose(*outs, gating_output, renormalize)
    return outs


def _fake_topk(
    gating_output: Tensor, k: int, wide: bool, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (gating_output.shape[0], k)
    return (
        gating_output.new_empty(shape, dtype=torch.float32),
        gating_output.new_empty(shape, dtype=torch.int64 if wide else torch.int32),
        gating_output.new_empty(shape, dtype=torch.int32),
    )


def _fake_grouped(
    scores: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor | None,
    scoring_func: int,
) -> tuple[Tensor, Tensor]:
    shape = (scores.shape[0], topk)
    return (
        scores.new_empty(shape, dtype=torch.float32),
        scores.new_empty(shape, dtype=torch.int32),
    )


define(
    "topk_softmax(Tensor gating_output, int k, bool wide, bool renormalize)"
    " -> (Tensor, Tensor, Tensor)",
    _functional_topk,
    _fake_topk,
)
define(
    "grouped_topk(Tensor scores, int n_group, int topk_group, int topk, bool renormalize,"
    " float routed_scaling_factor, Tensor? bias, int scoring_func) -> (Tensor, Tensor)",
    _grouped,
    _fake_grouped,
)
