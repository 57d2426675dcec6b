"""Mixtures of experts, unquantised."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.moe_align_block_size import (
    moe_align_block_size as vllm_moe_align_block_size,
)

from vllm_fl.dispatch.ops import check_expert_activation
from vllm_fl_cuda.layout import fits_32_bits, is_aligned, is_elsewhere

_MOST_EXPERTS = 992  # the sorting kernel's thread block holds 1024, and it rounds up to a warp


def moe_sum(input: Tensor, output: Tensor) -> None:
    """Sum over the experts of each token, by vLLM's ``_moe_C::moe_sum``."""
    _custom_ops.moe_sum(input, output)


def moe_sum_supports(input: Tensor, output: Tensor) -> bool | str:
    """Whether the kernel takes the arguments: it walks both by their shapes."""
    if is_elsewhere(input):
        return "the input is not on a CUDA device"
    if input.numel() == 0:
        return "there are no tokens"
    if not (input.is_contiguous() and fits_32_bits(input)):
        return "the input is not contiguous, or has 2^31 elements"
    if not (is_aligned(input, input.shape[2]) and is_aligned(output, input.shape[2])):
        return "a tensor does not start at a multiple of the kernel's vector"
    return True


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices by expert, by vLLM's function around ``_moe_C::moe_align_block_size``.

    The kernel leaves out ids from ``num_experts`` on but not negative ones, and what it writes
    after the last block is not stated.
    """
    ids = torch.where(topk_ids < 0, num_experts, topk_ids)
    entries, experts, used = vllm_moe_align_block_size(
        ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts
    )
    starts = torch.arange(0, len(experts) * block_size, block_size, device=experts.device)
    return entries, torch.where(starts < used, experts, -1), used


def moe_align_block_size_supports(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> bool | str:
    """Whether the kernel takes the arguments."""
    if is_elsewhere(topk_ids):
        return "the ids are not on a CUDA device"
    if topk_ids.numel() == 0:
        return "there are no tokens"
    if num_experts > _MOST_EXPERTS:
        return f"{num_experts} experts are more than the kernel's {_MOST_EXPERTS}"
    if expert_map is not None and not expert_map.is_contiguous():
        return "the expert map is not contiguous"
    return True


def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of the experts, by vLLM's Triton kernel ``fused_moe_kernel``.

    Ids outside the range get the weight 0 first: vLLM's function has no place for them. Sorting
    and sum are vLLM's own, too, whatever the operators ``moe_align_block_size`` and ``moe_sum``
    are: its function takes no others.

    Raises:
        ValueError: the operator does not have the activation.
    """
    check_expert_activation(activation)
    experts = w1.shape[0] if global_num_experts == -1 else global_num_experts
    ids = topk_ids.clamp(0, experts - 1)
    return fused_moe.fused_experts(
        hidden_states,
        w1,
        w2,
        torch.where(ids == topk_ids, topk_weights, 0.0),
        ids,
        activation=MoEActivation(activation),
        apply_router_weight_on_input=apply_router_weight_on_input,
        global_num_experts=experts,
        expert_map=expert_map,
    )


def fused_experts_supports(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
) -> bool | str:
    """Whether the kernels take the arguments."""
    if is_elsewhere(hidden_states):
        return "the hidden states are not on a CUDA device"
    if hidden_states.numel() == 0:
        return "there are no tokens"
    if not hidden_states.is_contiguous():
        return "the hidden states are not contiguous"
    if max(w1.shape[0], global_num_experts) > _MOST_EXPERTS:
        return f"more than {_MOST_EXPERTS} experts"
    if not (topk_weights.is_contiguous() and topk_ids.is_contiguous()):
        return "the weights or ids of the choices are not contiguous"
    if not fits_32_bits(hidden_states) or topk_ids.numel() * w1.shape[1] >= 2**31:
        return "more than 2^31 elements between the two products"
    return True
