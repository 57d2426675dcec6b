"""Writing new keys and values into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl_cuda.layout import is_aligned, is_elsewhere

_ones: dict[torch.device, Tensor] = {}  # scales that the kernel takes and, unquantised, ignores


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write new keys and values, by ``_C_cache_ops::reshape_and_cache_flash``."""
    one = _ones.get(key.device)
    if one is None:
        one = _ones[key.device] = torch.ones(1, device=key.device)
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        key, value, key_cache, value_cache, slot_mapping, "auto", one, one
    )


def reshape_and_cache_flash_supports(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> bool | str:
    """Whether the kernel takes the arguments.

    It knows one head size and the strides of the key cache, reads the heads of a token as one row,
    and moves 16 bytes at a time.
    """
    if is_elsewhere(key):
        return "the key is not on a CUDA device"
    if key.shape[1:] != value.shape[1:] or key_cache.shape != value_cache.shape:
        return "keys and values differ in shape"
    if any(x.dtype != key.dtype for x in (value, key_cache, value_cache)):
        return f"the value or a cache is not {key.dtype}, as the key is"
    if key_cache.stride() != value_cache.stride():
        return "the caches differ in their strides"
    if slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        return "the slots are not contiguous int64"
    if slot_mapping.shape[0] == 0:
        return "there are no tokens"
    size = key.shape[2]
    if any(x.stride()[1:] != (size, 1) for x in (key, value)):
        return "the heads of a token are not contiguous"
    if size * key.element_size() % 16:
        return f"heads of {size} channels are no multiple of 16 bytes"
    if not all(is_aligned(x, size) for x in (key, value, key_cache, value_cache)):
        return "a head does not start at a multiple of 16 bytes"
    return True
