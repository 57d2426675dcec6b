"""Which experts each token goes to."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import _custom_ops

from vllm_fl_cuda.layout import fits_32_bits, is_aligned, is_elsewhere

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_MOST = 32  # groups, and experts of a token, that the kernel has registers for


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Write the k most probable experts of each token, by vLLM's ``_moe_C::topk_softmax``."""
    _custom_ops.topk_softmax(
        topk_weights, topk_indices, token_expert_indices, gating_output, renormalize
    )
    return topk_weights, topk_indices


def topk_softmax_supports(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> bool | str:
    """Whether the kernel takes the logits: it walks the rows by their length."""
    if is_elsewhere(gating_output):
        return "the logits are not on a CUDA device"
    if gating_output.dtype not in _FLOATS:
        return f"there is no kernel for {gating_output.dtype}"
    if gating_output.numel() == 0:
        return "there are no tokens"
    if not (gating_output.is_contiguous() and fits_32_bits(gating_output)):
        return "the logits are not contiguous, or 2^31 of them"
    if not is_aligned(gating_output, gating_output.shape[1]):
        return "the logits do not start at a multiple of the kernel's vector"
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
    """Return weights and experts, by vLLM's ``_moe_C::grouped_topk``."""
    return torch.ops._moe_C.grouped_topk(
        scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func
    )


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
    """Whether the kernel takes the arguments; vLLM calls it under the same conditions."""
    if is_elsewhere(scores):
        return "the scores are not on a CUDA device"
    if bias is None:
        return "without a bias the kernel would rank groups by two experts instead of one"
    if n_group > _MOST or topk > _MOST:
        return f"{n_group} groups and {topk} experts a token: the kernel takes {_MOST} at most"
    if scores.numel() == 0:
        return "there are no tokens"
    if not (scores.is_contiguous() and bias.is_contiguous() and fits_32_bits(scores)):
        return "the scores or the bias are not contiguous, or there are 2^31 scores"
    return True
