"""reshape_and_cache_flash."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vllm_fl_flaggems.kernels.cache import reshape_and_cache
from vllm_fl_flaggems.kernels.launch import INTERPRETED
from vllm_fl_flaggems.ops.library import define
from vllm_fl_flaggems.tiles import MAX_ROW, cache_tile


def supports(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> object:
    """Say whether the kernel takes these arguments."""
    if key.is_cpu and not INTERPRETED:
        return "the tensors are on the CPU; Triton compiles for accelerators"
    for name, part, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if part.dim() != 3 or cache.dim() != 4 or cache.shape[2:] != part.shape[1:]:
            return (
                f"the {name} {tuple(part.shape)} and its cache {tuple(cache.shape)} are not "
                "[tokens, heads, size] and [blocks, block_size, heads, size]"
            )
        if part.dtype != key.dtype or cache.dtype != key.dtype:
            return f"the {name} is {part.dtype}, its cache {cache.dtype}, the key {key.dtype}"
        if part.stride(2) != 1 or cache.stride(3) != 1:
            return f"the last dimension of the {name} or of its cache is not contiguous"
        if not 0 < part.shape[2] <= MAX_ROW:
            return f"heads of {part.shape[2]} channels are not between 1 and {MAX_ROW}"
    return True


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write new keys and values into their slots of the paged cache.

    Args:
        key: ``[T', kv_heads, D]``, fp16, bf16 or fp32, the last dimension contiguous.
        value: ``[T', kv_heads, Dv]``, of the key's dtype, likewise.
        key_cache: ``[blocks, block_size, kv_heads, D]``, any strides with a contiguous last
            dimension; overwritten in the slots.
        value_cache: ``[blocks, block_size, kv_heads, Dv]``, likewise.
        slot_mapping: ``[T]`` int64, ``T <= T'``; -1 for a token that is not written.
    """
    if is_compiling():
        torch.ops.vllm_fl_flaggems.reshape_and_cache_flash(
            key, value, key_cache, value_cache, slot_mapping
        )
    else:
        _write(key, value, key_cache, value_cache, slot_mapping)


def _write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    if slot_mapping.shape[0] and key.shape[1]:
        tile = cache_tile(key.shape[1], max(key.shape[2], value.shape[2]))
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, tile)


def _fake(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    return None


define(
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor slot_mapping) -> ()",
    _write,
    _fake,
)
