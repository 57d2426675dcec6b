"""How vLLM lays out the KV cache so that keys and values are contiguous each.

The operators take the keys of a layer as one contiguous tensor, and the values as another. vLLM up
to 0.28 asks the backend for the cache's shape. Later versions have a shape of their own,
``[blocks, heads, block_size, content]`` with key and value of a head side by side in the content,
in one of several orders in memory; a backend may publish other heads and contents.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend


class _ShapeOfTheBackend(AttentionBackend):
    """vLLM up to 0.28."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the shape: all keys, then all values."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class _TwoPlanes(AttentionBackend):
    """vLLM from 0.29 on: two "heads", the keys and the values, each with a plane of memory."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Publish two head slots whose content is a token's keys, or values, of all heads."""
        if spec.state_content_bytes is not None:
            return spec
        width = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
        return replace(spec, num_head_slots=2, state_content_bytes=width)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the order with the head slot outside the blocks."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LHBNC,)


CacheLayout: type[AttentionBackend] = (
    _TwoPlanes if hasattr(AttentionBackend, "supported_kv_cache_layouts") else _ShapeOfTheBackend
)
"""The base class of the backend for the installed vLLM."""


def keys_and_values(kv_cache: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return views ``[blocks, block_size, heads, size]`` of a cache of either form."""
    planes = kv_cache.unbind(0) if kv_cache.dim() == 5 else kv_cache.unbind(1)
    keys, values = (plane.view(*plane.shape[:2], num_kv_heads, -1) for plane in planes)
    return keys, values
