"""Which experts each token goes to."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from vllm_fl_ascend.device import is_elsewhere

_MAX_TOP_K = 1024  # of npu_moe_gating_top_k_softmax
_MAX_EXPERTS = 2048  # of npu_moe_gating_top_k, counted with each group rounded up
_GROUP_UNIT = 32
_SIGMOID = 1  # norm_type
_BEST, _TWO_BEST = 0, 1  # group_select_mode: what a group is ranked by


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose the k experts of the largest probabilities, by ``npu_moe_gating_top_k_softmax``.

    The logits are cast to fp32 first, since the weights have the dtype of the logits. Its third
    result counts rows by column: ``j * T + t`` at ``[t, j]``.
    """
    weights, experts, places = torch_npu.npu_moe_gating_top_k_softmax(
        gating_output.to(torch.float32).contiguous(), k=topk_weights.shape[-1]
    )
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_indices.copy_(experts)
    token_expert_indices.copy_(places)
    return topk_weights, topk_indices


def topk_softmax_supports(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> bool | str:
    """Whether ``npu_moe_gating_top_k_softmax`` takes the logits: k up to 1024."""
    if is_elsewhere(topk_weights, topk_indices, token_expert_indices, gating_output):
        return "the logits or an output are not on an NPU"
    if gating_output.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the logits are {gating_output.dtype}"
    if gating_output.shape[0] == 0:
        return "there are no tokens"
    k, experts = topk_weights.shape[-1], gating_output.shape[-1]
    if not 1 <= k <= min(experts, _MAX_TOP_K):
        return f"k is {k}, not between 1 and {min(experts, _MAX_TOP_K)}"
    return True


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
    """Choose experts of the best groups, by ``npu_moe_gating_top_k``, in fp32.

    With sigmoid scores it always divides the weights by their sum.
    """
    weights, experts, _ = torch_npu.npu_moe_gating_top_k(
        scores.to(torch.float32).contiguous(),
        topk,
        bias=None if bias is None else bias.to(torch.float32),
        k_group=topk_group,
        group_count=n_group,
        group_select_mode=_BEST if bias is None else _TWO_BEST,
        norm_type=_SIGMOID,
        routed_scaling_factor=routed_scaling_factor,
    )
    return weights, experts


def grouped_topk_supports(
    scores: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor | None,
    scoring_func: int = 0,
) -> bool | str:
    """Whether ``npu_moe_gating_top_k`` computes this.

    Documented: groups of more than two experts; the size of a group rounded up to 32, times the
    groups, up to 2048. Plain scores, and sigmoid scores that are not divided by their sum, are not
    among what it computes.
    """
    if is_elsewhere(scores, bias):
        return "the scores or the bias are not on an NPU"
    if scoring_func != 1:
        return "npu_moe_gating_top_k takes no scores as they are"
    if not renormalize:
        return "npu_moe_gating_top_k always divides sigmoid scores by their sum"
    if scores.shape[0] == 0:
        return "there are no tokens"
    size, rest = divmod(scores.shape[1], max(n_group, 1))
    if n_group < 1 or rest or size <= 2:
        return f"{scores.shape[1]} experts do not make {n_group} equal groups of more than two"
    if bias is not None and bias.shape != scores.shape[1:]:
        return f"the bias has the shape {list(bias.shape)}, there are {scores.shape[1]} experts"
    if -(-size // _GROUP_UNIT) * _GROUP_UNIT * n_group > _MAX_EXPERTS:
        return f"{n_group} groups of {size} experts are more than {_MAX_EXPERTS} when padded"
    if not (1 <= topk_group <= n_group and 1 <= topk <= topk_group * size):
        return f"{topk} experts cannot be chosen from {topk_group} of {n_group} groups of {size}"
    return True
