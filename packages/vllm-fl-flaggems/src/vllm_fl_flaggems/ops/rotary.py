"""rotary_embedding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vllm_fl_flaggems.kernels.rotary import rotate_heads
from vllm_fl_flaggems.ops import formulas
from vllm_fl_flaggems.ops.layout import overlaps, refusal
from vllm_fl_flaggems.tiles import rotary_tile

_POSITIONS = (torch.int64, torch.int32)
_TABLES = (torch.float16, torch.bfloat16, torch.float32)


def supports(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    is_neox_style: bool,
) -> object:
    """Say whether ``rotary_embedding`` takes these arguments."""
    reason = refusal(query) or _heads_refusal(query, cos)
    if reason:
        return f"query: {reason}"
    if cos.dtype not in _TABLES or sin.dtype != cos.dtype:
        return f"cos and sin have dtypes {cos.dtype} and {sin.dtype}"
    if cos.stride(1) != 1 or sin.stride() != cos.stride() or sin.shape != cos.shape:
        return "cos and sin are not laid out alike, with a contiguous last dimension"
    if position_ids.dim() != 1 or position_ids.dtype not in _POSITIONS:
        return "position_ids is not a vector of int32 or int64"
    if position_ids.stride(0) != 1:
        return f"position_ids is not contiguous (stride {position_ids.stride(0)})"
    if key is None:
        return True
    reason = refusal(key) or _heads_refusal(key, cos)
    if reason:
        return f"key: {reason}"
    if key.dtype != query.dtype or key.shape[2] != query.shape[2]:
        return "key has another dtype or head size than query"
    return True


def _heads_refusal(x: Tensor, cos: Tensor) -> str:
    if x.dim() != 3:
        return f"rank {x.dim()}, not [tokens, heads, head size]"
    if cos.dim() != 2 or cos.shape[1] == 0:
        return "cos is not [positions, rotary pairs]"
    if 2 * cos.shape[1] > x.shape[2]:
        return f"{2 * cos.shape[1]} rotated channels do not fit a head size of {x.shape[2]}"
    return ""


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    is_neox_style: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rotate pairs of query and key channels by an angle that depends on the position.

    The first ``2 * half`` channels of a head are rotated, the others stay as they are. Cosine and
    sine, each product and each sum are rounded to the dtype of ``query`` (vLLM
    ``RotaryEmbedding``).

    Args:
        query: ``[tokens, query_heads, head]``, fp16, bf16 or fp32, the last dimension contiguous.
            Overwritten unless heads can overlap.
        key: ``[tokens, key_heads, head]``, likewise, or None; overwritten together with ``query``.
        cos: ``[max_position, half]``.
        sin: like ``cos``.
        position_ids: ``[tokens]``, below ``max_position``.
        is_neox_style: pair channel ``i`` with ``i + half``, otherwise ``2 * i`` with ``2 * i + 1``.

    Returns:
        ``(query, key)``, rotated.
    """
    if is_compiling():
        return formulas.rotary_embedding(query, key, cos, sin, position_ids, is_neox_style)
    outs = None
    if _may_overlap(query) or (key is not None and _may_overlap(key)):
        outs = query.new_empty(query.shape), None if key is None else key.new_empty(key.shape)
    _rotate(outs, query, key, cos, sin, position_ids, is_neox_style)
    return (query, key) if outs is None else outs


def _may_overlap(x: Tensor) -> bool:
    _, heads, size = x.shape
    token_stride, head_stride, _ = x.stride()
    return overlaps((heads, token_stride, head_stride), size)


def _rotate(
    outs: tuple[Tensor, Tensor | None] | None,
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    neox: bool,
) -> None:
    """Launch the kernel, unless there is nothing to rotate; ``outs`` None for in place."""
    tokens, heads, _ = query.shape
    total = tokens * (heads if key is None else heads + key.shape[1])
    if total:
        tile = rotary_tile(total, cos.shape[1])
        rotate_heads(outs, query, key, cos, sin, position_ids, neox, tile)
