"""moe_align_block_size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vllm_fl_flaggems.kernels import align as kernels
from vllm_fl_flaggems.kernels.align import Choices
from vllm_fl_flaggems.moe_tiles import MAX_BLOCK, MAX_EXPERTS, align_tile
from vllm_fl_flaggems.ops.layout import refusal
from vllm_fl_flaggems.ops.library import define

_IDS = (torch.int32, torch.int64)


def supports(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> object:
    """Say whether ``moe_align_block_size`` takes these arguments."""
    reason = ids_refusal(topk_ids)
    if reason:
        return reason
    if not topk_ids.is_contiguous():
        return f"topk_ids is not contiguous (strides {tuple(topk_ids.stride())})"
    if not 1 <= num_experts <= MAX_EXPERTS:
        return f"{num_experts} experts are not between 1 and {MAX_EXPERTS}"
    if not 1 <= block_size <= MAX_BLOCK:
        return f"blocks of {block_size} are not between 1 and {MAX_BLOCK}"
    return map_refusal(expert_map, num_experts) or True


def ids_refusal(topk_ids: Tensor) -> str:
    """Say why the kernels do not take these ids; "" if they do."""
    reason = refusal(topk_ids)
    if reason:
        return f"topk_ids: {reason}"
    if topk_ids.dtype not in _IDS:
        return f"topk_ids has dtype {topk_ids.dtype}"
    return "" if topk_ids.dim() == 2 else f"topk_ids has rank {topk_ids.dim()}, not [tokens, k]"


def map_refusal(expert_map: Tensor | None, experts: int) -> str:
    """Say why the kernels do not take this map; "" if they do."""
    if expert_map is None:
        return ""
    if expert_map.dim() != 1 or expert_map.shape[0] != experts or expert_map.stride(0) != 1:
        return f"expert_map is not a contiguous vector of {experts} elements"
    return "" if expert_map.dtype == torch.int32 else f"expert_map has dtype {expert_map.dtype}"


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices by expert and pad each expert's part to whole blocks.

    All shapes follow from the arguments' shapes; nothing waits for the device
    (vLLM ``moe_align_block_size``).

    Args:
        topk_ids: ``[tokens, k]`` int32 or int64, contiguous; not modified. Ids outside
            ``[0, num_experts)`` are left out.
        block_size: entries of a block, at most 4096.
        num_experts: experts of all ranks together, at most 4096.
        expert_map: ``[num_experts]`` int32, global to local expert, -1 for those of other ranks;
            or None.
        pad_sorted_ids: whether to round the size of ``sorted_ids`` up to a whole block.
        ignore_invalid_experts: whether to leave out the choices that ``expert_map`` maps to -1.

    Returns:
        New int32 ``(sorted_ids, expert_ids, num_tokens_post_pad)``, as the operator's contract
        describes them.
    """
    arguments = (
        topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts
    )  # fmt: skip
    if is_compiling():
        return torch.ops.vllm_fl_flaggems.moe_align_block_size(*arguments)
    return _aligned(*arguments)


def _aligned(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    count = topk_ids.numel()
    outs = outputs(topk_ids, count, block_size, num_experts, pad_sorted_ids)
    if count:
        choices = Choices(topk_ids, num_experts, num_experts, expert_map, ignore_invalid_experts)
        tile = align_tile(count, num_experts, block_size)
        kernels.align(*outs, choices, block_size, tile)
    else:
        outs[2].zero_()
    return outs


def outputs(
    ids: Tensor, count: int, block: int, experts: int, pad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three results, not written yet, for ``count`` choices."""
    size = count + experts * (block - 1)
    if pad:
        size = -(-size // block) * block
    # No more experts than choices have a part; with as many choices the other size is smaller.
    size = torch.sym_min(count * block, size)
    return (
        ids.new_empty((size,), dtype=torch.int32),
        ids.new_empty((-(-size // block),), dtype=torch.int32),
        ids.new_empty((1,), dtype=torch.int32),
    )


def _fake(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return outputs(topk_ids, topk_ids.numel(), block_size, num_experts, pad_sorted_ids)


define(
    "moe_align_block_size(Tensor topk_ids, int block_size, int num_experts, Tensor? expert_map,"
    " bool pad_sorted_ids, bool ignore_invalid_experts) -> (Tensor, Tensor, Tensor)",
    _aligned,
    _fake,
)
