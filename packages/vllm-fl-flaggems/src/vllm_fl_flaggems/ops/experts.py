"""fused_experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vllm_fl.dispatch.default import shared_op
from vllm_fl.dispatch.ops import check_expert_activation
from vllm_fl_flaggems.kernels.align import Choices
from vllm_fl_flaggems.kernels.experts import Blocks, down_project, up_project
from vllm_fl_flaggems.kernels.launch import shared_memory
from vllm_fl_flaggems.moe_tiles import MAX_EXPERTS, ExpertsTile, experts_tile
from vllm_fl_flaggems.ops.align import ids_refusal, map_refusal
from vllm_fl_flaggems.ops.layout import refusal
from vllm_fl_flaggems.ops.library import define


def supports(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
) -> object:
    """Say whether ``fused_experts`` takes these arguments; an unknown activation is an error."""
    for name, tensor, rank in (("hidden_states", hidden_states, 2), ("w1", w1, 3), ("w2", w2, 3)):
        reason = refusal(tensor)
        if reason:
            return f"{name}: {reason}"
        if tensor.dim() != rank:
            return f"{name} has rank {tensor.dim()}, not {rank}"
        if tensor.dtype != hidden_states.dtype:
            return f"{name} has dtype {tensor.dtype}, hidden_states {hidden_states.dtype}"
    experts, twice_inner, hidden = w1.shape
    most = max(experts, global_num_experts)
    if experts < 1 or most > MAX_EXPERTS:
        return f"{most} experts are not between 1 and {MAX_EXPERTS}"
    if twice_inner < 2 or twice_inner % 2 or hidden < 1:
        return f"w1 {tuple(w1.shape)} is not [experts, 2 * inner, hidden]"
    if tuple(w2.shape) != (experts, hidden, twice_inner // 2) or hidden_states.shape[1] != hidden:
        return f"hidden states, w1 {tuple(w1.shape)} and w2 {tuple(w2.shape)} do not fit"
    reason = ids_refusal(topk_ids)
    if reason:
        return reason
    if topk_weights.dtype != torch.float32:
        return f"topk_weights has dtype {topk_weights.dtype}"
    if topk_weights.shape != topk_ids.shape or topk_ids.shape[0] != hidden_states.shape[0]:
        return "topk_weights, topk_ids and hidden_states have other numbers of tokens or choices"
    if topk_ids.shape[1] == 0:
        return "the tokens have no choices"
    return map_refusal(expert_map, _range(w1, global_num_experts)) or True


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

    Both products and the activation are fp32 inside; the activation's result and each expert's
    weighted result are rounded to the dtype, and so is their fp32 sum (vLLM ``fused_experts``;
    Shazeer et al. 2017, arXiv:1701.06538). Sorting the choices and the sum are the operators
    ``moe_align_block_size`` and ``moe_sum``, whoever implements them. All shapes follow from the
    arguments' shapes; nothing waits for the device.

    Args:
        hidden_states: ``[tokens, hidden]``, fp16, bf16 or fp32, the last dimension contiguous; not
            modified.
        w1: ``[experts, 2 * inner, hidden]``, gate rows first, the last dimension contiguous.
        w2: ``[experts, hidden, inner]``, the last dimension contiguous.
        topk_weights: ``[tokens, k]`` fp32.
        topk_ids: ``[tokens, k]`` int32 or int64.
        activation: ``"silu"`` or ``"gelu"``.
        apply_router_weight_on_input: whether the weight multiplies the hidden state instead of
            the expert's result.
        global_num_experts: range of ``topk_ids``; -1 for the experts of ``w1``.
        expert_map: ``[global_num_experts]`` int32, to the experts of ``w1`` or -1; or None.

    Returns:
        A new tensor ``[tokens, hidden]``; zeros for a token that has no expert here.

    Raises:
        ValueError: the activation is unknown.
    """
    check_expert_activation(activation)
    arguments = (
        hidden_states, w1, w2, topk_weights, topk_ids, activation, apply_router_weight_on_input,
        global_num_experts, expert_map,
    )  # fmt: skip
    if is_compiling():
        return torch.ops.vllm_fl_flaggems.fused_experts(*arguments)
    return _run(*arguments)


def _range(w1: Tensor, global_num_experts: int) -> int:
    return w1.shape[0] if global_num_experts == -1 else global_num_experts


def _run(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
    global_num_experts: int,
    expert_map: Tensor | None,
) -> Tensor:
    out = hidden_states.new_empty(hidden_states.shape)
    if not out.numel():
        return out
    experts, twice_inner, hidden = w1.shape
    choices = Choices(
        topk_ids.contiguous(), _range(w1, global_num_experts), experts, expert_map, local=True
    )
    tile = experts_tile(
        *topk_ids.shape, experts, hidden, twice_inner // 2, w1.itemsize, shared_memory()
    )
    on_input = apply_router_weight_on_input
    run_experts(out, hidden_states, w1, w2, topk_weights, choices, activation, on_input, tile)
    return out


def run_experts(
    out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    choices: Choices,
    activation: str,
    on_input: bool,
    tile: ExpertsTile,
) -> None:
    """Write the result of :func:`fused_experts`, computed in a given way.

    Sorting and sum are those of the process-wide policy, bound once.

    Args:
        out: ``[tokens, hidden]``, contiguous, with at least one element; overwritten.
        x: the hidden states.
        w1: as there.
        w2: as there.
        topk_weights: as there.
        choices: the contiguous ids and where they lead.
        activation: as there.
        on_input: whether the weight multiplies the hidden state.
        tile: how.
    """
    tokens, hidden = out.shape
    count, inner = choices.ids.numel(), w2.shape[2]
    weights = topk_weights.contiguous()
    sorted_blocks = None
    if not tile.direct:
        sorted_blocks = shared_op("moe_align_block_size")(
            choices.ids, tile.rows, choices.range, choices.expert_map, True, True
        )
    blocks = Blocks(choices, tile.rows, sorted_blocks)
    rows = count if sorted_blocks is None else sorted_blocks[0].numel()
    middle = x.new_empty((rows, inner))
    up_project(middle, x, w1, weights, blocks, activation, on_input, tile.up)
    results = x.new_empty((count, hidden))
    down_project(results, middle, w2, weights, blocks, not on_input, tile.down)
    shared_op("moe_sum")(results.view(tokens, -1, hidden), out)


def _fake(hidden_states: Tensor, *_: object) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape)


define(
    "fused_experts(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights,"
    " Tensor topk_ids, str activation, bool apply_router_weight_on_input, int global_num_experts,"
    " Tensor? expert_map) -> Tensor",
    _run,
    _fake,
)
