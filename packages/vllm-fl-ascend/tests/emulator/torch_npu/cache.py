"""Writing the KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.library import kernel, require, require_floats


def _fake(
    key, value, key_cache, value_cache, slot_mapping, compress_lens=None,
    compress_seq_offsets=None, seq_lens=None, cache_mode="PA_NZ",
):  # fmt: skip
    return None


@kernel(_fake)
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Write key and value [T, heads, size] into caches [blocks, block_size, heads, size].

    docs (its second scenario): cache_mode "Norm" or None for the plain layout (the default is a
    blocked one, not emulated); everything contiguous and of one dtype; slots int32 or int64 in
    [0, blocks * block_size). What a slot that is there twice holds afterwards is undefined.
    """
    name = "npu_scatter_pa_kv_cache"
    require_floats(name, key, value, key_cache, value_cache)
    require(cache_mode in (None, "Norm"), f"{name}: cache_mode={cache_mode!r} is not emulated")
    require(compress_lens is compress_seq_offsets is seq_lens is None, f"{name}: compression")
    require(slot_mapping.dtype in (torch.int32, torch.int64), f"{name}: slots' dtype")
    for x in (key, value, key_cache, value_cache, slot_mapping):
        require(x.is_contiguous(), f"{name}: a tensor is not contiguous")
    require(key.dim() == 3 and key.shape[:2] == value.shape[:2], f"{name}: key and value")
    require(slot_mapping.shape == key.shape[:1], f"{name}: one slot a token")
    slots = slot_mapping.long()
    for x, cache in ((key, key_cache), (value, value_cache)):
        require(cache.dim() == 4 and cache.shape[2:] == x.shape[1:], f"{name}: {cache.shape}")
        inside = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
        require(bool(inside.all()), f"{name}: a slot is outside the cache")
        rows = cache.view(-1, *cache.shape[2:])
        rows[slots] = x
        numbers, counts = slots.unique(return_counts=True)
        rows[numbers[counts > 1]] = torch.nan
