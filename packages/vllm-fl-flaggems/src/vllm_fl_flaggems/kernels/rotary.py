"""Rotary position embedding of query and key heads in one launch.

The heads of all tokens, query heads before key heads in each token, are numbered through; a program
takes a tile of them, so that its threads are busy whatever the number of heads is. Cosine and sine
of a token are fetched from memory once and from the cache for its other heads. Products and sums
are rounded to the input's dtype one by one: the order of vLLM's own layers and kernels. Elements
are independent, so the tile does not change a result.
"""

# ruff: noqa: ANN001, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_fl_flaggems.kernels.launch import launch_options, wait_for_inputs
from vllm_fl_flaggems.tiles import RotaryTile


@triton.jit
def _product(a, b, dtype: tl.constexpr):
    """Return ``a * b`` rounded to ``dtype``, as fp32."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _rotate(first, second, cos, sin):
    dtype: tl.constexpr = first.dtype
    new_first = _product(first, cos, dtype) - _product(second, sin, dtype)
    new_second = _product(second, cos, dtype) + _product(first, sin, dtype)
    return new_first.to(dtype), new_second.to(dtype)


@triton.jit(do_not_specialize=["heads"])
def _rotary_kernel(
    query_out,
    key_out,
    query,
    key,
    cos,
    sin,
    positions,
    heads,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    table_stride,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    NEOX: tl.constexpr,
    IN_PLACE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    each: tl.constexpr = QUERY_HEADS + KEY_HEADS
    number = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    live = number < heads
    token = (number // each).to(tl.int64)
    head = (number % each).to(tl.int64)
    is_query = head < QUERY_HEADS
    key_head = head - QUERY_HEADS
    from_query = query + (token * query_token_stride + head * query_head_stride)
    from_key = key + (token * key_token_stride + key_head * key_head_stride)
    source = tl.where(is_query, from_query, from_key)[:, None]
    if IN_PLACE:
        target = source
    else:
        to_query = query_out + (token * QUERY_HEADS + head) * HEAD
        to_key = key_out + (token * KEY_HEADS + key_head) * HEAD
        target = tl.where(is_query, to_query, to_key)[:, None]

    position = tl.load(positions + token, mask=live, other=0).to(tl.int64)
    half = tl.arange(0, BLOCK)[None, :]
    inside = live[:, None] & (half < HALF)
    angle = (position * table_stride)[:, None] + half
    if NEOX:
        first = tl.load(source + half, mask=inside)
        second = tl.load(source + HALF + half, mask=inside)
        cosine = tl.load(cos + angle, mask=inside).to(first.dtype)
        sine = tl.load(sin + angle, mask=inside).to(first.dtype)
        new_first, new_second = _rotate(first, second, cosine, sine)
        tl.store(target + half, new_first, mask=inside)
        tl.store(target + HALF + half, new_second, mask=inside)
    else:
        both = tl.arange(0, 2 * BLOCK)[None, :]
        both_inside = live[:, None] & (both < 2 * HALF)
        pairs = tl.load(source + both, mask=both_inside)
        first, second = tl.split(tl.reshape(pairs, (HEADS, BLOCK, 2)))
        cosine = tl.load(cos + angle, mask=inside).to(first.dtype)
        sine = tl.load(sin + angle, mask=inside).to(first.dtype)
        new_first, new_second = _rotate(first, second, cosine, sine)
        joined = tl.reshape(tl.join(new_first, new_second), (HEADS, 2 * BLOCK))
        tl.store(target + both, joined, mask=both_inside)
    if TAIL_BLOCK > 0:
        tail = 2 * HALF + tl.arange(0, TAIL_BLOCK)[None, :]
        tail_inside = live[:, None] & (tail < HEAD)
        tl.store(target + tail, tl.load(source + tail, mask=tail_inside), mask=tail_inside)


def rotate_heads(
    outs: tuple[Tensor, Tensor | None] | None,
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    neox: bool,
    tile: RotaryTile,
) -> None:
    """Write the rotated query and key, to ``outs`` or over the inputs.

    Args:
        outs: of the inputs' shapes and dtype, contiguous; overwritten. None to overwrite ``query``
            and ``key``, whose heads must then not overlap; their channels from ``2 * half`` on
            are not touched.
        query: ``[tokens, query_heads, head]``, the last dimension contiguous.
        key: ``[tokens, key_heads, head]``, likewise, of the same dtype, or None. There is at least
            one head in all.
        cos: ``[max_position, half]``, the last dimension contiguous.
        sin: as ``cos``, with the same strides.
        positions: ``[tokens]`` integers, contiguous.
        neox: pair channel ``i`` with ``i + half``, otherwise ``2 * i`` with ``2 * i + 1``.
        tile: how many heads a program takes, and its size.
    """
    tokens, query_heads, size = query.shape
    half = cos.shape[1]
    query_out, key_out = (query, key) if outs is None else outs
    if key is None:  # no head of it is reached
        key, key_out, key_heads = query, query_out, 0
    else:
        key_heads = key.shape[1]
    query_token_stride, query_head_stride, _ = query.stride()
    key_token_stride, key_head_stride, _ = key.stride()
    heads = tokens * (query_heads + key_heads)
    tail = 0 if outs is None else size - 2 * half
    _rotary_kernel[(-(-heads // tile.heads),)](
        query_out,
        key_out,
        query,
        key,
        cos,
        sin,
        positions,
        heads,
        query_token_stride,
        query_head_stride,
        key_token_stride,
        key_head_stride,
        cos.stride(0),
        QUERY_HEADS=query_heads,
        KEY_HEADS=key_heads,
        HEAD=size,
        HALF=half,
        HEADS=tile.heads,
        BLOCK=triton.next_power_of_2(half),
        TAIL_BLOCK=triton.next_power_of_2(tail) if tail else 0,
        NEOX=neox,
        IN_PLACE=outs is None,
        num_warps=tile.warps,
        **launch_options(),
    )
