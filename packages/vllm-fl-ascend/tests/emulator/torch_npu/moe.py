"""Mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.library import kernel, require, require_floats


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Largest values first; of equal ones, about which the pages say nothing, the first."""
    ordered, indices = torch.sort(values, dim=-1, descending=True, stable=True)
    return ordered[..., :count], indices[..., :count]


def _chosen(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


@kernel(lambda x, finished=None, k=1: (*_chosen(x, k), _chosen(x, k)[1]))
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax, then its k largest: values of x's dtype, experts, and rows by column.

    docs: 2 or 3 dimensions (2 are emulated), 0 < k <= experts, k <= 1024.
    """
    name = "npu_moe_gating_top_k_softmax"
    require_floats(name, x)
    require(finished is None and x.dim() == 2, f"{name}: only 2 dimensions are emulated")
    require(0 < k <= min(x.shape[1], 1024), f"{name}: k={k} of {x.shape[1]}")
    values, experts = _largest(torch.softmax(x.float(), dim=-1), k)
    rows = torch.arange(k * len(x), dtype=torch.int32).view(k, -1).t().contiguous()
    return values.to(x.dtype), experts.int(), rows


def _fake_gating(x, k, **how):
    return (*_chosen(x, k), x.new_empty(x.shape, dtype=torch.float32))


def _gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, the best groups by score + bias, then the k best experts of these.

    docs: norm_type 0 softmax, 1 sigmoid; a group is ranked by its best expert
    (group_select_mode 0) or the sum of its two best (1); renorm 0 alone; bias of x's dtype; up to
    2048 experts; groups of more than 2, whose size rounded up to 32, times the groups, is at most
    2048; k <= experts / group_count * k_group.
    aclnnMoeGatingTopK: with sigmoid the scores are divided by their sum + eps.
    """
    name = "npu_moe_gating_top_k"
    require_floats(name, x, bias)
    require(input_ids is None and tid2eid is None, f"{name}: hash routing is not emulated")
    require(renorm == 0, f"{name}: renorm={renorm}")
    require(x.dim() == 2 and x.shape[1] <= 2048, f"{name}: x {x.shape}")
    tokens, experts = x.shape
    size = experts // group_count
    require(group_count > 0 and experts % group_count == 0 and size > 2, f"{name}: group_count")
    require(-(-size // 32) * 32 * group_count <= 2048, f"{name}: too many groups")
    require(1 <= k_group <= group_count and 1 <= k <= size * k_group, f"{name}: k, k_group")
    require(group_select_mode in (0, 1) and norm_type in (0, 1), f"{name}: a mode")
    scores = torch.sigmoid(x.float()) if norm_type else torch.softmax(x.float(), dim=-1)
    ranked = scores if bias is None else scores + bias.float()
    groups = ranked.view(tokens, group_count, size)
    best = groups.topk(1 + group_select_mode, dim=-1).values.sum(dim=-1)
    allowed = torch.zeros(best.shape, dtype=torch.bool).scatter(1, _largest(best, k_group)[1], True)
    masked = groups.masked_fill(~allowed[..., None], -torch.inf).view(tokens, experts)
    chosen = _largest(masked, k)[1]
    values = scores.gather(1, chosen)
    if norm_type == 1:
        values = values / (values.sum(dim=-1, keepdim=True) + eps)
    norms = scores if out_flag else torch.full_like(scores, torch.nan)
    return (values * routed_scaling_factor).to(x.dtype), chosen.int(), norms


_gating_top_k.__name__ = "npu_moe_gating_top_k"
kernel(_fake_gating)(_gating_top_k)


def _fake_routing(x, expert_idx, *, expert_num=-1, active_expert_range=(), **how):
    rows = expert_idx.numel()
    first, last = active_expert_range or (0, expert_num)
    return (
        x.new_empty((rows, x.shape[1])),
        x.new_empty((rows,), dtype=torch.int32),
        x.new_empty((last - first,), dtype=torch.int64),
        x.new_empty((rows,), dtype=torch.float32),
    )


@kernel(_fake_routing)
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of x in the order of their experts, where each choice went, and rows an expert.

    docs: x [T, H], expert_idx [T, k] int32 below expert_num; drop_pad_mode 0;
    expert_tokens_num_type 1 (counts) or 2, expert_tokens_num_flag True; 0 < expert_num <= 10240;
    active_expert_range [start, end) within it. What is not of an active expert lies behind, with
    undefined rows, and its place is -1 (row_idx_type 0).
    """
    name = "npu_moe_init_routing_v2"
    require_floats(name, x)
    require(x.dim() == expert_idx.dim() == 2 and len(x) == len(expert_idx), f"{name}: shapes")
    require(expert_idx.dtype == torch.int32, f"{name}: expert_idx is {expert_idx.dtype}")
    require(scale is offset is x_dtype is None and quant_mode == -1, f"{name}: quantisation")
    require(drop_pad_mode == 0 and row_idx_type == 0, f"{name}: a mode that is not emulated")
    require(expert_tokens_num_type == 1 and expert_tokens_num_flag, f"{name}: counts")
    require(0 < expert_num <= 10240, f"{name}: expert_num={expert_num}")
    require(active_num in (-1, 0, expert_idx.numel()), f"{name}: active_num={active_num}")
    first, last = active_expert_range or (0, expert_num)
    require(0 <= first < last <= expert_num, f"{name}: range [{first}, {last})")
    flat = expert_idx.flatten().long()
    if len(flat):
        low, high = flat.aminmax()
        require(bool(low >= 0) and bool(high < expert_num), f"{name}: an expert is out of range")
    active = (flat >= first) & (flat < last)
    order = torch.argsort(torch.where(active, flat, expert_num), stable=True)
    count = int(active.sum())
    rows = torch.full((len(flat), x.shape[1]), torch.nan, dtype=x.dtype)
    rows[:count] = x[order[:count] // expert_idx.shape[1]]
    places = torch.full((len(flat),), -1, dtype=torch.int32)
    places[order[:count]] = torch.arange(count, dtype=torch.int32)
    counts = torch.bincount(flat[active] - first, minlength=last - first)
    return rows, places, counts, torch.full((len(flat),), torch.nan)


def _fake_matmul(x, weight, **how):
    return [x[0].new_empty((x[0].shape[0], weight[0].shape[2]))]


@kernel(_fake_matmul)
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    **rest: object,
) -> list[Tensor]:
    """Rows of x times the weight [K, N] of their group; rows behind the groups are undefined.

    docs: one x [M, K] and one weight [E, K, N], also transposed; split_item 2 or 3 for one output;
    group_type 0 for groups of rows; group_list int64 with an entry a group, its end
    (group_list_type 0) or its size (1, and then not one group alone); last dimensions of x and of
    the weight as it lies in memory below 65536.
    """
    name = "npu_grouped_matmul"
    require(all(value is None for value in rest.values()), f"{name}: {rest} is not emulated")
    require(len(x) == len(weight) == 1, f"{name}: one tensor each is emulated")
    rows, matrices = x[0], weight[0]
    require_floats(name, rows, matrices)
    require(split_item in (2, 3) and group_type == 0 and act_type == 0, f"{name}: a mode")
    require(rows.dim() == 2 and matrices.dim() == 3, f"{name}: dimensions")
    require(rows.shape[1] == matrices.shape[1], f"{name}: {rows.shape} and {matrices.shape}")
    straight, transposed = matrices.is_contiguous(), matrices.mT.is_contiguous()
    require(rows.is_contiguous() and (straight or transposed), f"{name}: strides")
    inner = (rows.shape[1], matrices.shape[2 if straight else 1])
    require(max(inner) < 65536, f"{name}: an inner dimension of {max(inner)}")
    groups = matrices.shape[0]
    require(
        group_list is not None and group_list.dtype == torch.int64 and len(group_list) == groups,
        f"{name}: group_list",
    )
    if group_list_type == 1:
        require(groups > 1, f"{name}: a single size")
        group_list = group_list.cumsum(0)
    out = torch.full((rows.shape[0], matrices.shape[2]), torch.nan, dtype=rows.dtype)
    first = 0
    for group, last in enumerate(group_list.tolist()):
        require(first <= last <= len(rows), f"{name}: the ends of the groups {group_list}")
        out[first:last] = (rows[first:last].float() @ matrices[group].float()).to(rows.dtype)
        first = last
    return [out]


def _fake_unpermute(
    permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None
):
    k = 1 if probs is None else probs.shape[1]
    return permuted_tokens.new_empty((sorted_indices.shape[0] // k, permuted_tokens.shape[1]))


@kernel(_fake_unpermute)
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """sum_j probs[t, j] * permuted_tokens[sorted_indices[t * k + j]].

    docs: padded_mode False; probs [T, k]. aclnnMoeTokenUnpermute: fp16, bf16 or fp32 tokens,
    int32 indices, k up to 512. Probs of another dtype than the tokens are not among the documented
    combinations.
    """
    name = "npu_moe_token_unpermute"
    require_floats(name, permuted_tokens, probs)
    require(not padded_mode and restore_shape is None, f"{name}: padded_mode")
    require(permuted_tokens.dim() == 2 and sorted_indices.dim() == 1, f"{name}: dimensions")
    require(sorted_indices.dtype == torch.int32, f"{name}: {sorted_indices.dtype}")
    k = 1 if probs is None else probs.shape[1]
    require(k <= 512, f"{name}: k={k}")
    rows = sorted_indices.long()
    if len(rows):
        low, high = rows.aminmax()
        require(bool(low >= 0) and bool(high < len(permuted_tokens)), f"{name}: an index")
    taken = permuted_tokens[rows].float().view(-1, k, permuted_tokens.shape[1])
    if probs is not None:
        taken = taken * probs.float().unsqueeze(-1)
    return taken.sum(dim=1).to(permuted_tokens.dtype)
