"""The experts of a mixture-of-experts layer."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from vllm_fl.dispatch.ops import check_expert_activation
from vllm_fl_ascend.device import is_elsewhere
from vllm_fl_ascend.ops.activation import gelu_and_mul, silu_and_mul

_ACTIVATIONS = {"silu": silu_and_mul, "gelu": gelu_and_mul}
_INNER_LIMIT = 65536  # the last dimension of what npu_grouped_matmul multiplies is below it
_MAX_EXPERTS = 10240  # of npu_moe_init_routing_v2
_COUNTS = 1  # expert_tokens_num_type
_ENDS = 0  # group_list_type: cumulative; the other type refuses a single group
_ONE_OUTPUT = 2  # split_item
_ROWS = 0  # group_type: the groups are groups of rows


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
    """Sort the rows by expert, multiply group by group, and add up what belongs to each token.

    By ``npu_moe_init_routing_v2``, ``npu_grouped_matmul``, an activation, ``npu_grouped_matmul``
    and ``npu_moe_token_unpermute``. Choices that have no expert here are given one past the last,
    which the range of active experts leaves out; their rows lie behind all others and hold
    anything.

    Raises:
        ValueError: the activation is unknown.
    """
    check_expert_activation(activation)
    experts = w1.shape[0]
    ids = _local_ids(topk_ids, experts, global_num_experts, expert_map)
    x = hidden_states
    if apply_router_weight_on_input:  # one expert a token, says the predicate
        x = (x * topk_weights).to(x.dtype)
        topk_weights = torch.ones_like(topk_weights)
    rows, places, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x.contiguous(),
        ids,
        active_num=ids.numel(),
        expert_num=experts + 1,
        expert_tokens_num_type=_COUNTS,
        expert_tokens_num_flag=True,
        active_expert_range=[0, experts],
    )
    ends = counts.cumsum(0)
    inner = _ACTIVATIONS[activation](_grouped(rows, w1, ends))
    results = _grouped(inner, w2, ends)
    # A choice without an expert has no place (-1). It is sent to row 0 with weight zero, and where
    # row 0 belongs to nobody, what it holds must be a number: zero times NaN is NaN.
    results[:1].masked_fill_(ends[-1:, None] == 0, 0)
    weights = topk_weights.masked_fill(ids == experts, 0).to(results.dtype)
    total: Tensor = torch_npu.npu_moe_token_unpermute(results, places.clamp(min=0), probs=weights)
    return total


def _local_ids(
    topk_ids: Tensor, experts: int, global_num_experts: int, expert_map: Tensor | None
) -> Tensor:
    """Return the ids as int32 rows of w1, ``experts`` for choices that have none."""
    total = experts if global_num_experts == -1 else global_num_experts
    ids = topk_ids.to(torch.int32)
    inside = (ids >= 0) & (ids < total)
    if expert_map is not None:
        ids = expert_map.to(torch.int32)[ids.clamp(0, total - 1).long()]
        inside = inside & (ids >= 0)
    return torch.where(inside, ids, experts).contiguous()


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its expert's weight [N, K], given transposed as a view."""
    out: Tensor = torch_npu.npu_grouped_matmul(
        [rows],
        [weight.transpose(1, 2)],
        group_list=ends,
        split_item=_ONE_OUTPUT,
        group_type=_ROWS,
        group_list_type=_ENDS,
    )[0]
    return out


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
    """Whether the vendor's operators take the arguments; an unknown activation raises when called.

    Documented: dimensions of the weights below 65536 and up to 10240 experts.
    """
    if is_elsewhere(hidden_states, w1, w2, topk_weights, topk_ids, expert_map):
        return "the arguments are not on an NPU"
    if hidden_states.shape[0] == 0:
        return "there are no tokens"
    if w1.dtype != hidden_states.dtype or w2.dtype != hidden_states.dtype:
        return f"the hidden states are {hidden_states.dtype} and the weights {w1.dtype}, {w2.dtype}"
    if not (w1.is_contiguous() and w2.is_contiguous()):
        return "w1 or w2 is not contiguous"
    if max(*w1.shape[1:], *w2.shape[1:]) >= _INNER_LIMIT:
        return f"a dimension of the weights is not below {_INNER_LIMIT}"
    if w1.shape[0] >= _MAX_EXPERTS:
        return f"{w1.shape[0]} experts are more than {_MAX_EXPERTS - 1}"
    if apply_router_weight_on_input and topk_ids.shape[1] > 1:
        return "the weights of several experts cannot multiply one row of the input"
    return True
