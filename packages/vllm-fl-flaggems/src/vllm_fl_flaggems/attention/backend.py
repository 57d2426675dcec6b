"""vLLM's view of the Triton attention: backend, metadata, builder and implementation.

Works with vLLM 0.26 to 0.33; methods that only some of them call say so.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_fl.dispatch.phases import PREFILL
from vllm_fl.integration.attention_checks import (
    check_blocks,
    check_layer,
    check_output,
    check_per_head,
    check_step,
    refuse,
)
from vllm_fl.integration.layers import bind, recover
from vllm_fl_flaggems.attention.planning import (
    ANY_LENGTH,
    Mathematics,
    Step,
    attend,
    compile_variants,
)
from vllm_fl_flaggems.kernels.interpreted import BFLOAT16_REFUSAL

WHO = "the Triton attention of vllm-fl-flaggems"
LARGEST_HEAD = 256
_KV_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class AttentionFLBackend(AttentionBackend):
    """Paged attention by Triton kernels.

    What it cannot do (latent or sparse attention, quantised caches, encoders, cross attention,
    bidirectional ranges for multimodal prefixes, context parallelism, ...) it leaves unsupported in
    vLLM's ``supports_*`` answers and its implementation's, so that it is not selected, and the
    reason is known.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    # vLLM writes the cache through do_kv_cache_update, an operator of its own in the graph.
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Return the one name that vLLM leaves to out-of-tree backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionFLImpl]:
        """Return the implementation class."""
        return AttentionFLImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionFLMetadataBuilder]:
        """Return the metadata builder class."""
        return AttentionFLMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        """Return multiples of 16, vLLM's usual unit. vLLM 0.33 passes the spec."""
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
        """Return the order in memory that vLLM is set to. Called up to vLLM 0.28.

        Heads inside tokens ("NHD"), unless a KV connector or VLLM_KV_CACHE_LAYOUT says "HND"; the
        kernels take both, and whatever later versions choose.
        """
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        if get_kv_cache_layout() == "HND":
            return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @staticmethod
    def use_cascade_attention(*args: object, **kwargs: object) -> bool:
        """Return False: a common prefix needs no special treatment."""
        return False

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return whether a program can hold a head."""
        return 0 < head_size <= LARGEST_HEAD

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        *args: object,
        **kwargs: object,
    ) -> str | None:
        """Refuse a cache of another dtype than the model's, and bf16 in Triton's interpreter."""
        if dtype == torch.bfloat16 and BFLOAT16_REFUSAL:
            return BFLOAT16_REFUSAL
        if _KV_DTYPES.get(kv_cache_dtype, dtype) != dtype:
            return f"kv_cache_dtype {kv_cache_dtype} is not the model's dtype {dtype}"
        return None

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


@dataclass
class AttentionFLMetadata(AttentionMetadata):
    """One step of one KV cache group.

    Attributes:
        step: what the kernels need.
        block_size: tokens in a cache block.
    """

    step: Step
    block_size: int


class AttentionFLMetadataBuilder(AttentionMetadataBuilder[AttentionFLMetadata]):
    """Points at vLLM's persistent buffers; nothing is read from the device or copied.

    The kernels find the lengths on the device, and their grids depend on the padded numbers of
    tokens and requests alone, so that any step may be captured in a CUDA graph.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        """Take the block size from the group's spec; nothing comes from model-level sizes."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        self.longest = vllm_config.model_config.max_model_len
        mode = vllm_config.compilation_config.cudagraph_mode
        self.captures_decodes_apart = mode is not None and mode.separate_routine()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AttentionFLMetadata:
        """Return the step's metadata.

        Args:
            common_prefix_len: Ignored: cascade attention is not used.
            common_attn_metadata: vLLM's description of the step.
            fast_build: Ignored: there is one way to build.

        Raises:
            NotImplementedError: The step asks for bidirectional multimodal ranges or for
                reference sliding windows.
        """
        return self._build(common_attn_metadata, _query_bounds(common_attn_metadata))

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> AttentionFLMetadata:
        """Return metadata that is right for every step that will replay the graph.

        Where decodes have graphs of their own, no request of such a graph has more query tokens
        than the captured one; otherwise a replayed step may be anything.
        """
        most = common_attn_metadata.max_query_len
        bounds = (1, most) if self.captures_decodes_apart else ANY_LENGTH
        return self._build(common_attn_metadata, bounds)

    def _build(
        self, common: CommonAttentionMetadata, queries: tuple[int, int]
    ) -> AttentionFLMetadata:
        check_step(WHO, common)
        requests = common.num_reqs
        causal = common.causal
        step = Step(
            tokens=common.num_actual_tokens,
            query_start=common.query_start_loc[: requests + 1],
            lengths=common.seq_lens[:requests],
            table=common.block_table_tensor[:requests],
            causal=causal if isinstance(causal, bool) else causal[:requests],
            queries=queries,
            longest=self.longest,
        )
        return AttentionFLMetadata(step=step, block_size=self.block_size)


def _query_bounds(common: CommonAttentionMetadata) -> tuple[int, int]:
    """Return fewest and most query tokens of the requests that have any, from the host's copy.

    The device may know that there are fewer (adaptive speculation), never more; a kernel that is
    launched takes those, too.
    """
    most = common.max_query_len
    if most <= 1:
        return (1, most)
    lengths = np.diff(common.query_start_loc_cpu[: common.num_reqs + 1].numpy())
    return (int(lengths[lengths > 0].min(initial=most)), most)


class AttentionFLImpl(AttentionImpl[AttentionFLMetadata]):
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
            head_size: Channels of a query, key or value head.
            scale: Factor on the scores.
            num_kv_heads: Key and value heads; None for as many as query heads.
            alibi_slopes: One slope per query head.
            sliding_window: Keys that a query sees, the current token included.
            kv_cache_dtype: ``auto``, or the model's dtype.
            logits_soft_cap: Bound of the scores; 0 and None mean no bound.
            attn_type: ``decoder``.
            kv_sharing_target_layer_name: The layer whose cache this one reads instead of writing.
            sinks: ``[num_heads]`` extra logits; may be loaded later, so only referenced.
            unsupported: Whatever else a model passes.

        Raises:
            NotImplementedError: Something in the arguments is not supported; the text names it.
            ValueError: There is not one sink or slope per query head, the heads do not divide, or
                the scale is not positive.
        """
        check_layer(WHO, AttentionFLBackend, self, attn_type, kv_cache_dtype, unsupported)
        too_large = not AttentionFLBackend.supports_head_size(head_size)
        refuse(WHO, {f"heads of {head_size} channels, more than {LARGEST_HEAD}": too_large})
        check_per_head(num_heads, sinks=sinks, alibi_slopes=alibi_slopes)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"{num_heads} query heads are not a multiple of {self.num_kv_heads} kv heads"
            )
        if self.scale <= 0:
            raise ValueError(f"scale must be positive, got {scale}")
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.layer = Mathematics(
            scale=self.scale,
            window=sliding_window,
            cap=None if logits_soft_cap in (None, 0) else logits_soft_cap,
            sinks=sinks,
            # On the device that vLLM builds the layer for.
            slopes=None if alibi_slopes is None else torch.tensor(alibi_slopes).float(),
        )
        self._write = bind("reshape_and_cache_flash")

    def do_kv_cache_update(
        self,
        layer: AttentionLayer | None,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Store new keys and values in their slots.

        vLLM does not call it for a layer that shares another one's cache.

        Args:
            layer: The layer; not used.
            key: ``[>= tokens, num_kv_heads, head_size]``.
            value: ``[>= tokens, num_kv_heads, head_size]``.
            kv_cache: ``[blocks, num_kv_heads, block_size, 2 * head_size]``, **modified**.
            slot_mapping: ``[tokens]`` int64, -1 for padding.
        """
        keys, values = self._halves(kv_cache)
        fn = self._write.fn
        try:
            fn(key, value, keys, values, slot_mapping)
        except Exception as error:
            recover(self._write, fn, error, key, value, keys, values, slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: AttentionFLMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend to the keys and values of the cache, the new ones among them.

        Args:
            layer: The layer; not used.
            query: ``[tokens, num_heads, head_size]``.
            key: Not used: it is in the cache already.
            value: Not used.
            kv_cache: ``[blocks, num_kv_heads, block_size, 2 * head_size]``.
            attn_metadata: The step, or None in a profiling run.
            output: ``[tokens, num_heads, head_size]``, **modified**; padding rows are left alone.
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
        check_blocks(kv_cache.shape[2], attn_metadata.block_size)
        keys, values = self._halves(kv_cache)
        attend(output, query, keys, values, attn_metadata.step, self.layer)
        return output

    def warm_up(self, kv_cache: Tensor, vllm_config: VllmConfig, phases: Collection[str]) -> None:
        """Compile every variant of the kernels that steps of these phases may need.

        They are launched for a request without tokens: every program ends at once, and what the
        cache holds is neither read nor written.

        Args:
            kv_cache: ``[blocks, num_kv_heads, block_size, 2 * head_size]``, the layer's own.
            vllm_config: how many requests and tokens there may be.
            phases: of the steps that this implementation will get.
        """
        keys, values = self._halves(kv_cache)
        heads = kv_cache.new_zeros((1, self.num_heads, self.head_size))
        nothing = torch.zeros(2, dtype=torch.int32, device=kv_cache.device)
        if self.kv_sharing_target_layer_name is None:
            new = heads[:, : self.num_kv_heads]
            no_slot = torch.full((1,), -1, dtype=torch.int64, device=kv_cache.device)
            self.do_kv_cache_update(None, new, new, kv_cache, no_slot)
        empty = Step(
            tokens=1,
            query_start=nothing,
            lengths=nothing[:1],
            table=nothing[:1, None],
            causal=True,
            queries=(1, 1),
            longest=vllm_config.model_config.max_model_len,
        )
        scheduler = vllm_config.scheduler_config
        compile_variants(
            torch.empty_like(heads),
            heads,
            keys,
            values,
            empty,
            self.layer,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens if PREFILL in phases else 1,
        )

    def _halves(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return key and value cache, ``[blocks, block_size, num_kv_heads, head_size]``."""
        tokens = kv_cache.transpose(1, 2)
        return tokens[..., : self.head_size], tokens[..., self.head_size :]
