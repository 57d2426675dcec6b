"""Writing the paged KV cache."""

from __future__ import annotations

import torch_npu
from torch import Tensor

from vllm_fl_ascend.device import is_elsewhere

PLAIN_LAYOUT = "Norm"
"""The cache_mode of caches [blocks, block_size, heads, size]; the default one is blocked."""


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write new keys and values into their slots, by ``npu_scatter_pa_kv_cache``.

    It takes no slots of -1, so that padding is taken out first, which waits for the device. The
    attention of this wheel, which knows what is padding, calls the vendor's operator itself.

    Not ``_npu_reshape_and_cache``: that needs the library ATB, and refuses fp32.
    """
    real = slot_mapping >= 0
    tokens = slot_mapping.shape[0]
    slots = slot_mapping[real]
    if slots.shape[0]:
        torch_npu.npu_scatter_pa_kv_cache(
            key[:tokens][real],
            value[:tokens][real],
            key_cache,
            value_cache,
            slots,
            cache_mode=PLAIN_LAYOUT,
        )


def reshape_and_cache_flash_supports(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> bool | str:
    """Whether ``npu_scatter_pa_kv_cache`` takes the caches: contiguous, of the keys' dtype."""
    if is_elsewhere(key, value, key_cache, value_cache, slot_mapping):
        return "keys, values, caches or slots are not on an NPU"
    if not (key.dtype == value.dtype == key_cache.dtype == value_cache.dtype):
        return "keys, values and caches differ in dtype"
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        return "a cache is not contiguous"
    return True
