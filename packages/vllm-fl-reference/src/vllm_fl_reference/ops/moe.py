"""The experts of a mixture-of-experts layer (Shazeer et al., 2017, arXiv:1701.06538)."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl.dispatch.ops import check_expert_activation
from vllm_fl_reference.ops.activation import gelu_and_mul, silu_and_mul

ACTIVATIONS = {"silu": silu_and_mul, "gelu": gelu_and_mul}


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices by expert and pad each expert's part to whole blocks.

    All shapes follow from the arguments' shapes, so that nothing waits for the device. What
    belongs nowhere is written to one entry past the end, which is cut off.

    Args:
        topk_ids: ``[tokens, k]``, any integer dtype; not modified. Ids outside
            ``[0, num_experts)`` are left out.
        block_size: Entries in a block.
        num_experts: How many experts there are, all ranks together.
        expert_map: ``[num_experts]``, global to local expert, -1 for those of other ranks; or
            None.
        pad_sorted_ids: Whether to round the size of ``sorted_ids`` up to a whole block.
        ignore_invalid_experts: Whether to leave out the choices that ``expert_map`` maps to -1.

    Returns:
        New int32 tensors ``(sorted_ids, expert_ids, num_tokens_post_pad)``, as the operator's
        contract describes them; an expert's entries are in ascending order.
    """
    device = topk_ids.device
    ids = topk_ids.reshape(-1).to(torch.int64)
    count = ids.numel()
    size = count + num_experts * (block_size - 1)
    if pad_sorted_ids:
        size = -(-size // block_size) * block_size
    if count < num_experts:
        size = min(count * block_size, size)
    blocks = -(-size // block_size)

    valid = (ids >= 0) & (ids < num_experts)
    if expert_map is not None and ignore_invalid_experts:
        ids = expert_map.to(torch.int64)[ids.clamp(0, num_experts - 1)]
        valid &= ids >= 0
    ids = torch.where(valid, ids, num_experts)

    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    padded = -(-counts[:-1] // block_size) * block_size
    ends = padded.cumsum(0)
    first_place = torch.cat((ends - padded, ends.new_full((1,), size)))
    first_rank = counts.cumsum(0) - counts

    order = torch.argsort(ids, stable=True)
    expert = ids[order]
    places = first_place[expert] + torch.arange(count, device=device) - first_rank[expert]
    places = torch.where(expert < num_experts, places, size)
    sorted_ids = torch.full((size + 1,), count, dtype=torch.int32, device=device)
    sorted_ids.scatter_(0, places, order.to(torch.int32))

    starts = torch.arange(blocks, device=device) * block_size
    expert_ids = torch.searchsorted(ends, starts, right=True)
    used = expert_ids < num_experts
    if expert_map is not None and not ignore_invalid_experts:
        expert_ids = expert_map[expert_ids.clamp(max=num_experts - 1)]
    expert_ids = torch.where(used, expert_ids, -1)
    return sorted_ids[:size], expert_ids.to(torch.int32), padded.sum().to(torch.int32).view(1)


def moe_sum(input: Tensor, output: Tensor) -> None:
    """Sum over the experts of each token, in fp32, rounded once.

    Args:
        input: ``[tokens, k, width]``, any floating dtype and strides; not modified.
        output: ``[tokens, width]``; written.

    Raises:
        ValueError: The shapes do not fit together.
    """
    if input.dim() != 3 or output.shape != (input.shape[0], input.shape[2]):
        raise ValueError(
            f"moe_sum: input [tokens, k, width] and output [tokens, width] do not fit: "
            f"{tuple(input.shape)} and {tuple(output.shape)}"
        )
    output.copy_(input.sum(dim=1, dtype=torch.float32))


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
    """Run each token through its experts and add up their weighted results.

    One expert after the other, those with tokens only. Rounding order: the results of both
    products and of the activation are rounded to the dtype; weighting and summing are fp32, and
    the sum is rounded once. Finding the experts with tokens waits for the device.

    Args:
        hidden_states: ``[tokens, hidden]``, any floating dtype and strides; not modified.
        w1: ``[experts, 2 * inner, hidden]``, gate rows first.
        w2: ``[experts, hidden, inner]``.
        topk_weights: ``[tokens, k]``.
        topk_ids: ``[tokens, k]``, any integer dtype.
        activation: ``"silu"`` or ``"gelu"``.
        apply_router_weight_on_input: Whether the weight multiplies the hidden state instead of
            the expert's result.
        global_num_experts: Range of ``topk_ids``; -1 for the experts of ``w1``.
        expert_map: ``[global_num_experts]``, to the experts of ``w1`` or -1; or None.

    Returns:
        A new tensor ``[tokens, hidden]``; zeros for a token that has no expert here.

    Raises:
        ValueError: The activation is unknown or the shapes do not fit together.
    """
    check_expert_activation(activation)
    experts, twice_inner, hidden = w1.shape
    if w2.shape != (experts, hidden, twice_inner // 2) or hidden_states.shape[1:] != (hidden,):
        raise ValueError(
            f"fused_experts: hidden states {tuple(hidden_states.shape)}, w1 {tuple(w1.shape)} and "
            f"w2 {tuple(w2.shape)} do not fit together"
        )
    if topk_ids.shape != topk_weights.shape or len(topk_ids) != len(hidden_states):
        raise ValueError(
            f"fused_experts: topk_ids {tuple(topk_ids.shape)} and topk_weights "
            f"{tuple(topk_weights.shape)} do not fit {len(hidden_states)} tokens"
        )
    ids = _local_ids(topk_ids, experts if global_num_experts == -1 else global_num_experts)
    if expert_map is not None:
        ids = torch.where(ids >= 0, expert_map.to(torch.int64)[ids.clamp(min=0)], -1)
    act = ACTIVATIONS[activation]
    total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    for expert in ids[ids >= 0].unique().tolist():
        tokens, places = torch.where(ids == expert)
        x = hidden_states[tokens]
        weights = topk_weights[tokens, places].to(torch.float32).unsqueeze(1)
        if apply_router_weight_on_input:
            x = (x * weights).to(x.dtype)
        result = (act(x @ w1[expert].t()) @ w2[expert].t()).to(torch.float32)
        if not apply_router_weight_on_input:
            result = result * weights
        total.index_add_(0, tokens, result)
    return total.to(hidden_states.dtype)


def _local_ids(topk_ids: Tensor, experts: int) -> Tensor:
    """Return the ids as int64, -1 for those outside the range."""
    ids = topk_ids.to(torch.int64)
    return torch.where((ids >= 0) & (ids < experts), ids, -1)
