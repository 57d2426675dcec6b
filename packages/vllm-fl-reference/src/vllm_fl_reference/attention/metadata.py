"""What one step of one KV cache group needs, and how it is made from vLLM's description."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_fl.integration.attention_checks import check_step
from vllm_fl_reference.attention.planning import (
    CacheSlots,
    Tile,
    plan_attention,
    plan_cache_write,
)

WHO = "the reference attention backend"


@dataclass
class ReferenceAttentionMetadata(AttentionMetadata):
    """One step of one KV cache group.

    Index tensors are made when the first layer asks and kept for the others. They depend on the
    sliding window, which may differ between layers of a group, so there is one set per window.

    Attributes:
        num_actual_tokens: Query tokens; rows past them are padding.
        query_start: ``requests + 1`` offsets into the query.
        seq_lens: Length of each request with this step's tokens.
        causal: For all requests or one for each.
        block_table: ``[requests, columns]``.
        slot_mapping: ``[tokens]``, -1 for padding.
        block_size: Tokens in a cache block.
    """

    num_actual_tokens: int
    query_start: list[int]
    seq_lens: list[int]
    causal: bool | list[bool]
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    _cached_tiles: dict[tuple[bool, int | None], tuple[Tile, ...]] = field(
        default_factory=dict, repr=False
    )

    @cached_property
    def slots(self) -> CacheSlots:
        """Where this step's keys and values go."""
        return plan_cache_write(self.slot_mapping, self.block_size)

    def tiles(self, window: int | None) -> tuple[Tile, ...]:
        """Return the plan over the paged cache for layers with this window."""
        return self._planned(False, window)

    def encoder_tiles(self, window: int | None) -> tuple[Tile, ...]:
        """Return the plan over this step's own keys, one "block" for each token."""
        return self._planned(True, window)

    def _planned(self, encoder: bool, window: int | None) -> tuple[Tile, ...]:
        tiles = self._cached_tiles.get((encoder, window))
        if tiles is None:
            tiles = self._plan_encoder(window) if encoder else self._plan_decoder(window)
            self._cached_tiles[encoder, window] = tiles
        return tiles

    def _plan_decoder(self, window: int | None) -> tuple[Tile, ...]:
        return plan_attention(
            self.query_start,
            self.seq_lens,
            self.block_table,
            self.block_size,
            window=window,
            causal=self.causal,
        )

    def _plan_encoder(self, window: int | None) -> tuple[Tile, ...]:
        starts = torch.tensor(self.query_start, device=self.block_table.device)
        lengths = [end - begin for begin, end in pairwise(self.query_start)]
        tokens = torch.arange(max(lengths, default=0), device=starts.device)
        return plan_attention(
            self.query_start,
            lengths,
            starts[:-1, None] + tokens,
            block_size=1,
            window=window,
            causal=False,
        )


class ReferenceAttentionMetadataBuilder(AttentionMetadataBuilder[ReferenceAttentionMetadata]):
    """Copies what a step needs out of vLLM's buffers.

    The lengths are read from the device, which waits for it once a step: the host's copies may
    be upper bounds only (asynchronous speculative decoding).
    """

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

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ReferenceAttentionMetadata:
        """Return the step's metadata.

        Args:
            common_prefix_len: Ignored: cascade attention is not used.
            common_attn_metadata: vLLM's description of the step.
            fast_build: Ignored: there is one way to build.

        Raises:
            NotImplementedError: The step asks for bidirectional multimodal ranges or for
                reference sliding windows.
        """
        common = common_attn_metadata
        check_step(WHO, common)
        requests = common.num_reqs
        causal = common.causal
        return ReferenceAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start=common.query_start_loc[: requests + 1].tolist(),
            seq_lens=common.seq_lens[:requests].tolist(),
            causal=causal if isinstance(causal, bool) else causal[:requests].bool().tolist(),
            block_table=common.block_table_tensor[:requests],
            slot_mapping=common.slot_mapping[: common.num_actual_tokens],
            block_size=self.block_size,
        )
