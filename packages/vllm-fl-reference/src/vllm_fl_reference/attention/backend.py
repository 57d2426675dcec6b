"""vLLM's view of the reference attention: backend and implementation.

Works with vLLM 0.26 to 0.33; methods that only some of them call say so.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionType,
    MultipleOf,
)

from vllm_fl.integration.attention_checks import (
    check_blocks,
    check_layer,
    check_output,
    check_per_head,
)
from vllm_fl_reference.attention.metadata import (
    WHO,
    ReferenceAttentionMetadata,
    ReferenceAttentionMetadataBuilder,
)
from vllm_fl_reference.attention.paged import paged_attention, write_kv_cache
from vllm_fl_reference.attention.planning import Tile

_ATTENTION_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_ONLY)


class ReferenceAttentionBackend(AttentionBackend):
    """Paged attention in plain PyTorch, on any device.

    What it cannot do (latent or sparse attention, quantised caches, cross attention, bidirectional
    ranges for multimodal prefixes, context parallelism, ...) it leaves unsupported in vLLM's
    ``supports_*`` answers and its implementation's, so that it is not selected, and the reason is
    known.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    # Where a key goes is planned together with the attention, so forward() stores it.
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        """Return the one name that vLLM leaves to out-of-tree backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[ReferenceAttentionImpl]:
        """Return the implementation class."""
        return ReferenceAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[ReferenceAttentionMetadataBuilder]:
        """Return the metadata builder class."""
        return ReferenceAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        """Return multiples of 16, vLLM's usual unit.

        Any size would be right, but vLLM picks the smallest for sliding-window layers, and blocks
        of one token are slow. vLLM 0.33 passes the spec.
        """
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the logical cache shape. Called up to vLLM 0.28; later it is vLLM's own rule."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return token-major memory order, the fastest to gather. Called up to vLLM 0.28.

        Later versions choose among layouts that the backend accepts; this one accepts all and
        their default is token-major too.
        """
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def get_required_kv_cache_layout(cls) -> Any:
        """Tell KV connectors of the order above. Called up to vLLM 0.28."""
        return "NHD"

    @staticmethod
    def use_cascade_attention(*args: object, **kwargs: object) -> bool:
        """Return False: a common prefix needs no special treatment."""
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Return True for decoder and for encoder-only attention."""
        return attn_type in _ATTENTION_TYPES

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return True."""
        return True


class ReferenceAttentionImpl(AttentionImpl[ReferenceAttentionMetadata]):
    """One layer's attention."""

    supports_dcp: bool = False
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **unsupported: object,
    ) -> None:
        """Check that everything that the layer asks for is supported.

        Args:
            num_heads: Query heads.
            head_size: Channels of a query or key head.
            scale: Factor on the scores.
            num_kv_heads: Key and value heads; None for as many as query heads.
            alibi_slopes: One slope per query head.
            sliding_window: Keys that a query sees, the current token included.
            kv_cache_dtype: ``auto``, ``float16`` or ``bfloat16``.
            logits_soft_cap: Bound of the scores; 0 and None mean no bound.
            attn_type: ``decoder`` or ``encoder_only``.
            kv_sharing_target_layer_name: The layer whose cache this one reads instead of writing.
            sinks: ``[num_heads]`` extra logits; may be loaded later, so only referenced.
            unsupported: Whatever else a model passes.

        Raises:
            NotImplementedError: Something in the arguments is not supported; the text names it.
            ValueError: There is not one sink or slope per query head.
        """
        check_layer(WHO, ReferenceAttentionBackend, self, attn_type, kv_cache_dtype, unsupported)
        check_per_head(num_heads, sinks=sinks, alibi_slopes=alibi_slopes)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.soft_cap = None if logits_soft_cap in (None, 0) else logits_soft_cap
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: ReferenceAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store the new keys and values, then attend.

        Args:
            layer: The layer; not used.
            query: ``[tokens, num_heads, head_size]``.
            key: ``[tokens, num_kv_heads, head_size]``, or None if another layer stored it.
            value: ``[tokens, num_kv_heads, value_size]``, or None.
            kv_cache: ``[blocks, num_kv_heads, block_size, head_size + value_size]``, **modified**
                unless the layer shares another one's cache.
            attn_metadata: The step, or None in a profiling run.
            output: ``[tokens, num_heads, value_size]``, **modified**; padding rows are left alone.
            output_scale: Must be None.
            output_block_scale: Must be None.

        Returns:
            ``output``.

        Raises:
            NotImplementedError: A quantised output is asked for.
            ValueError: The cache's blocks are not those that the metadata was built for.
        """
        check_output(WHO, output_scale, output_block_scale)
        if attn_metadata is None:
            return output.zero_()
        if self.attn_type == AttentionType.ENCODER_ONLY:
            return self._forward_encoder(query, key, value, attn_metadata, output)
        check_blocks(kv_cache.shape[2], attn_metadata.block_size)
        shares_cache = self.kv_sharing_target_layer_name is not None
        if key is not None and value is not None and not shares_cache:
            write_kv_cache(key, value, kv_cache, attn_metadata.slots)
        self._attend(query, kv_cache, attn_metadata.tiles(self.sliding_window), output)
        return output

    def _forward_encoder(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        attn_metadata: ReferenceAttentionMetadata,
        output: Tensor,
    ) -> Tensor:
        if key is None or value is None:
            raise ValueError("encoder-only attention has no cache: it needs a key and a value")
        tokens = torch.cat((key, value), dim=-1).unsqueeze(2)
        self._attend(query, tokens, attn_metadata.encoder_tiles(self.sliding_window), output)
        return output

    def _attend(
        self, query: Tensor, kv_cache: Tensor, tiles: tuple[Tile, ...], output: Tensor
    ) -> None:
        slopes = self.alibi_slopes
        paged_attention(
            query,
            kv_cache,
            tiles,
            self.scale,
            output,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            alibi_slopes=None if slopes is None else slopes.to(query.device),
        )
