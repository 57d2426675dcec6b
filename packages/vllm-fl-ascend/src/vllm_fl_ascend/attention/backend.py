"""vLLM's view of the Ascend attention: backend, builder and implementation.

Works with vLLM 0.26 to 0.33; what differs between them is in :mod:`.cache_layout`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch_npu
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_fl.integration.attention_checks import (
    check_blocks,
    check_layer,
    check_output,
    check_step,
    refuse,
)
from vllm_fl_ascend.attention.attention_mask import Corner, compressed
from vllm_fl_ascend.attention.cache_layout import CacheLayout, keys_and_values
from vllm_fl_ascend.attention.metadata import (
    MAX_DECODE_QUERIES,
    AscendAttentionMetadata,
    AttentionState,
    make_metadata,
)
from vllm_fl_ascend.ops.cache import PLAIN_LAYOUT

WHO = "attention on an NPU"
HEAD_SIZES = (64, 128, 192)
BLOCK_SIZE = 128
"""Of the sizes that both prefill and decode take, the one that the vendor recommends."""

_MAX_TOKENS = 65536  # of the layout TND in one call
_MAX_GROUP = 64  # query heads a key head
_MAX_WIDTH = 65535  # elements of a token in the cache
_MAX_CACHE = 2**31 - 1  # elements of the keys, and of the values
_BAND = 4  # sparse_mode


class AscendAttentionBackend(CacheLayout):
    """Attention by ``npu_fused_infer_attention_score`` over the paged cache.

    What it cannot do (latent and sparse attention, sinks, quantised caches, encoders, context
    parallelism, other head sizes, ...) it leaves unsupported in vLLM's ``supports_*`` answers, so
    that `validate_configuration` refuses it with the reason; what vLLM does not ask for there, the
    implementation refuses when a layer is built.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    # Which rows are padding is known to the metadata, so forward() writes the cache.
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        """Return the one name that vLLM leaves to out-of-tree backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AscendAttentionImpl]:
        """Return the implementation class."""
        return AscendAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AscendAttentionMetadataBuilder]:
        """Return the metadata builder class."""
        return AscendAttentionMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return those that the operator takes in the layout TND."""
        return list(HEAD_SIZES)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        """Return 128. vLLM 0.33 passes the spec."""
        return [BLOCK_SIZE]

    @staticmethod
    def use_cascade_attention(*args: object, **kwargs: object) -> bool:
        """Return False: a common prefix needs no special treatment."""
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Return True for decoder attention."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True."""
        return True


class AscendAttentionMetadataBuilder(AttentionMetadataBuilder[AscendAttentionMetadata]):
    """Copies what a step needs out of vLLM's buffers.

    The lengths of sequences are read from the device, which waits for it once a step: the host's
    copies may be upper bounds only (asynchronous speculative decoding).

    Raises:
        ValueError: More tokens a step, or more speculated tokens, are asked for than the operator
            takes.
    """

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        if tokens > _MAX_TOKENS:
            raise ValueError(
                f"max_num_batched_tokens is {tokens}; attention on an NPU takes up to "
                f"{_MAX_TOKENS} tokens a step."
            )
        speculative = vllm_config.speculative_config
        self.decode_queries = 1 + (speculative.num_speculative_tokens if speculative else 0)
        if self.decode_queries > MAX_DECODE_QUERIES:
            raise ValueError(
                f"num_speculative_tokens is {self.decode_queries - 1}; attention on an NPU takes "
                f"up to {MAX_DECODE_QUERIES - 1}."
            )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AscendAttentionMetadata | None:
        """Return the step's metadata; None for a step without tokens.

        Args:
            common_prefix_len: Ignored: cascade attention is not used.
            common_attn_metadata: vLLM's description of the step.
            fast_build: Ignored: there is one way to build.

        Raises:
            NotImplementedError: The step asks for attention that is not causal.
        """
        common = common_attn_metadata
        causal = common.causal
        is_causal = causal if isinstance(causal, bool) else bool(causal.all())
        refuse(WHO, {"attention to later tokens": not is_causal})
        check_step(WHO, common)
        requests = common.num_reqs
        return make_metadata(
            common.query_start_loc_cpu[: requests + 1].tolist(),
            common.seq_lens[:requests].tolist(),
            common.block_table_tensor,
            common.slot_mapping,
            self.block_size,
            self.decode_queries,
        )


class AscendAttentionImpl(AttentionImpl[AscendAttentionMetadata]):
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
            head_size: Channels of a head: 64, 128 or 192.
            scale: Factor on the scores.
            num_kv_heads: Key and value heads; None for as many as query heads.
            alibi_slopes: Must be None.
            sliding_window: Keys that a query sees, the current token included.
            kv_cache_dtype: ``auto``, ``float16`` or ``bfloat16``.
            logits_soft_cap: Must be None or 0.
            attn_type: ``decoder``.
            kv_sharing_target_layer_name: The layer whose cache this one reads instead of writing.
            sinks: Must be None.
            unsupported: Whatever else a model passes.

        Raises:
            NotImplementedError: Something in the arguments is not supported; the text names it.
        """
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        width = kv_heads * head_size
        check_layer(WHO, AscendAttentionBackend, self, attn_type, kv_cache_dtype, unsupported)
        refuse(
            WHO,
            {
                "soft caps of the scores": logits_soft_cap not in (None, 0),
                "ALiBi slopes": alibi_slopes is not None,
                "attention sinks": sinks is not None,
                f"heads of {head_size} channels": head_size not in HEAD_SIZES,
                f"{num_heads} query heads with {kv_heads} key heads": num_heads % kv_heads != 0
                or num_heads // kv_heads > _MAX_GROUP,
                f"{width} elements a token in the cache": width > _MAX_WIDTH,
            },
        )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: AscendAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store the new keys and values, then attend.

        Args:
            layer: The layer; not used.
            query: ``[tokens, num_heads, head_size]``.
            key: ``[tokens, num_kv_heads, head_size]``, or None if another layer stored it.
            value: As ``key``.
            kv_cache: As :mod:`.cache_layout` has it; **modified** unless the layer shares another
                one's cache.
            attn_metadata: The step, or None in a profiling run and for a step without tokens.
            output: ``[tokens, num_heads, head_size]``, **modified**; padding rows are left alone.
            output_scale: Must be None.
            output_block_scale: Must be None.

        Returns:
            ``output``.

        Raises:
            NotImplementedError: A quantised output is asked for.
            ValueError: The cache is not as the metadata or the operator needs it.
        """
        check_output(WHO, output_scale, output_block_scale)
        if attn_metadata is None:
            return output.zero_()
        keys, values = self._caches(kv_cache, attn_metadata)
        tokens = attn_metadata.num_tokens
        shares = self.kv_sharing_target_layer_name is not None or key is None or value is None
        rows = query[:tokens].contiguous()
        if key is not None and value is not None and not shares:
            key, value = key[:tokens].contiguous(), value[:tokens].contiguous()
            torch_npu.npu_scatter_pa_kv_cache(
                key, value, keys, values, attn_metadata.slots, cache_mode=PLAIN_LAYOUT
            )
            if attn_metadata.state is AttentionState.PREFILL_NO_CACHE:
                return _store(output, self._packed(rows, key, value, attn_metadata))
        if attn_metadata.state is AttentionState.DECODE_ONLY and self.sliding_window is not None:
            return _store(output, self._window_decode(rows, keys, values, attn_metadata))
        return _store(output, self._paged(rows, keys, values, attn_metadata))

    def _caches(self, kv_cache: Tensor, step: AscendAttentionMetadata) -> tuple[Tensor, Tensor]:
        """Return the keys and the values, ``[blocks, block_size, heads, size]``, contiguous."""
        keys, values = keys_and_values(kv_cache, self.num_kv_heads)
        check_blocks(keys.shape[1], step.block_size)
        if keys.numel() > _MAX_CACHE:
            raise ValueError(
                f"a layer's keys have {keys.numel()} elements, attention on an NPU takes up to "
                f"{_MAX_CACHE}: make the cache smaller with --kv-cache-memory-bytes"
            )
        return keys, values

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, step: AscendAttentionMetadata
    ) -> Tensor:
        """Attend to this step's keys, where there are no others; all lengths are cumulative."""
        return self._attend(
            query,
            key,
            value,
            actual_seq_lengths=step.query_ends,
            actual_seq_lengths_kv=step.query_ends,
            input_layout="TND",
            **self._causal(query.device),
        )

    def _paged(
        self, query: Tensor, keys: Tensor, values: Tensor, step: AscendAttentionMetadata
    ) -> Tensor:
        """Attend to the cache; the keys' lengths are those of each request."""
        plain = step.state is AttentionState.DECODE_ONLY and self.sliding_window is None
        return self._attend(
            query,
            keys.flatten(2),
            values.flatten(2),
            actual_seq_lengths=step.query_ends,
            actual_seq_lengths_kv=step.seq_lens,
            block_table=step.block_table,
            block_size=step.block_size,
            input_layout="TND",
            **({} if plain else self._causal(query.device)),
        )

    def _window_decode(
        self, query: Tensor, keys: Tensor, values: Tensor, step: AscendAttentionMetadata
    ) -> Tensor:
        """Attend through a sliding window with one query a request."""
        assert self.sliding_window is not None
        plan = step.decode_window(self.sliding_window)
        return self._attend(
            query.view(len(query), 1, -1),
            keys.flatten(2),
            values.flatten(2),
            atten_mask=plan.hidden,
            actual_seq_lengths_kv=plan.lengths,
            block_table=plan.block_table,
            block_size=step.block_size,
            input_layout="BSH",
        )

    def _causal(self, device: torch.device) -> dict[str, Any]:
        """Return the mask's arguments: right-down causal, or a band where there is a window."""
        mask = {"atten_mask": compressed(device)}
        if self.sliding_window is None:
            return {**mask, "sparse_mode": Corner.RIGHT_DOWN.value}
        # pre_tokens does not count the token itself, vLLM's window does.
        return {
            **mask,
            "sparse_mode": _BAND,
            "pre_tokens": self.sliding_window - 1,
            "next_tokens": 0,
        }

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        out: Tensor = torch_npu.npu_fused_infer_attention_score(
            query,
            key,
            value,
            num_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            scale=self.scale,
            **how,
        )[0]
        return out.view(-1, self.num_heads, self.head_size)


def _store(output: Tensor, rows: Tensor) -> Tensor:
    output[: len(rows)].copy_(rows)
    return output
