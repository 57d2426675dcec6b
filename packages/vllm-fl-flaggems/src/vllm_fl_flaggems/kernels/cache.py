"""Writing new keys and values into the paged cache: one program for some heads of a token."""

# ruff: noqa: ANN001, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_fl_flaggems.kernels.launch import launch_options, wait_for_inputs
from vllm_fl_flaggems.tiles import CacheTile, power_of_2


@triton.jit
def _copy_heads(
    cache,
    source,
    block,
    place,
    token,
    head,
    inside,
    cache_block_stride,
    cache_token_stride,
    cache_head_stride,
    token_stride,
    head_stride,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    column = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (column < SIZE)[None, :]
    origin = token * token_stride + head * head_stride
    row = tl.load(source + origin[:, None] + column[None, :], mask=mask)
    target = block * cache_block_stride + place * cache_token_stride + head * cache_head_stride
    tl.store(cache + target[:, None] + column[None, :], row, mask=mask)


@triton.jit
def _reshape_and_cache_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    slot_stride,
    key_strides,
    value_strides,
    key_cache_strides,
    value_cache_strides,
    KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slot_stride)
    if slot >= 0:
        block = (slot // PAGE).to(tl.int64)
        place = (slot % PAGE).to(tl.int64)
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        inside = head < KV_HEADS
        head = head.to(tl.int64)
        _copy_heads(
            key_cache, key, block, place, token, head, inside,
            key_cache_strides[0], key_cache_strides[1], key_cache_strides[2],
            key_strides[0], key_strides[1], KEY_SIZE, KEY_BLOCK,
        )  # fmt: skip
        _copy_heads(
            value_cache, value, block, place, token, head, inside,
            value_cache_strides[0], value_cache_strides[1], value_cache_strides[2],
            value_strides[0], value_strides[1], VALUE_SIZE, VALUE_BLOCK,
        )  # fmt: skip


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    tile: CacheTile,
) -> None:
    """Write keys and values of the tokens into their slots.

    Args:
        key: ``[>= tokens, kv_heads, D]``, contiguous last dimension.
        value: ``[>= tokens, kv_heads, Dv]``, contiguous last dimension.
        key_cache: ``[blocks, block_size, kv_heads, D]``, contiguous last dimension; overwritten in
            the slots.
        value_cache: ``[blocks, block_size, kv_heads, Dv]``, likewise.
        slots: ``[tokens]``, at least one; ``block * block_size + place``, negative for none.
        tile: how to cut the heads.
    """
    kv_heads, size = key.shape[1:]
    _reshape_and_cache_kernel[(slots.shape[0], -(-kv_heads // tile.heads))](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        slots.stride(0),
        key.stride()[:2],
        value.stride()[:2],
        key_cache.stride()[:3],
        value_cache.stride()[:3],
        KV_HEADS=kv_heads,
        KEY_SIZE=size,
        VALUE_SIZE=value.shape[2],
        KEY_BLOCK=power_of_2(size),
        VALUE_BLOCK=power_of_2(value.shape[2]),
        HEADS=tile.heads,
        PAGE=key_cache.shape[1],
        num_warps=tile.warps,
        **launch_options(),
    )
