"""Writing new keys and values into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Copy each token's key and value to its slot.

    All shapes follow from the arguments' shapes, so that nothing waits for the device: a token
    without a slot writes what some token with a slot writes, or what is in slot 0 already.

    Args:
        key: ``[>= tokens, kv_heads, size]``, any floating dtype and strides; not modified.
        value: ``[>= tokens, kv_heads, value_size]``.
        key_cache: ``[blocks, block_size, kv_heads, size]``, any strides; **modified** in the slots.
        value_cache: ``[blocks, block_size, kv_heads, value_size]``, likewise.
        slot_mapping: ``[tokens]``, any integer dtype; negative for a token without a slot.
    """
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    has_slot = slot_mapping >= 0
    numbers = torch.arange(tokens, device=slot_mapping.device)
    token = torch.where(has_slot, numbers, has_slot.to(torch.int8).argmax())
    slot = slot_mapping[token].to(torch.int64)
    some = (slot >= 0)[:, None, None]
    block_size = key_cache.shape[1]
    place = (slot.clamp(min=0) // block_size, slot.clamp(min=0) % block_size)
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.index_put_(place, torch.where(some, new[token], cache[place]))
