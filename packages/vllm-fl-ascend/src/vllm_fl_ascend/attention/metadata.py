"""What one step of one KV-cache group needs; lengths are numbers on the host.

``npu_fused_infer_attention_score`` takes the lengths as host integers, not as tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise

import torch
from torch import Tensor

MAX_DECODE_QUERIES = 16
"""Queries of a request that the vendor's decoding takes: one and the speculated ones."""

NULL_SLOT = 0
"""In block 0, which vLLM gives to no request. vLLM's trial runs have tokens without a slot (-1),
which the operator that writes the cache does not take."""


class AttentionState(Enum):
    """What the requests of a step have in common."""

    PREFILL_NO_CACHE = "prefill without cache"
    """No request has a key in the cache yet: this step's keys are all there are."""
    PREFILL_CACHE_HIT = "prefill with a cached prefix"
    """Requests start or go on with prompts, and some have keys in the cache."""
    DECODE_ONLY = "decode"
    """One query a request."""
    CHUNKED_PREFILL = "mix of prefill and decode"
    """Requests that decode beside requests with longer prompts."""
    SPEC_DECODING = "speculative decode"
    """A few queries a request, at most as many as are speculated and one."""


def state_of(
    query_lens: Sequence[int], seq_lens: Sequence[int], decode_queries: int = 1
) -> AttentionState:
    """Return the state of a step.

    Args:
        query_lens: queries of each request, at least 1.
        seq_lens: length of each request with this step's tokens.
        decode_queries: queries up to which a request with keys in the cache decodes.
    """
    pairs = list(zip(query_lens, seq_lens, strict=True))
    if all(queries == length for queries, length in pairs):
        return AttentionState.PREFILL_NO_CACHE
    if max(query_lens) == 1:  # a prompt of one token among them makes no difference
        return AttentionState.DECODE_ONLY
    decodes = [n < length and n <= decode_queries for n, length in pairs]
    if all(decodes):
        return AttentionState.SPEC_DECODING
    if any(decodes):
        return AttentionState.CHUNKED_PREFILL
    return AttentionState.PREFILL_CACHE_HIT


@dataclass(frozen=True)
class DecodeWindow:
    """The part of the cache that one query a request sees through a sliding window.

    Attributes:
        block_table: ``[requests, columns]`` int32, from the block where the window starts.
        lengths: keys of each request from there on.
        hidden: ``[requests, 1, 1, columns * block_size]`` bool, True before the window.
    """

    block_table: Tensor
    lengths: list[int]
    hidden: Tensor


@dataclass
class AscendAttentionMetadata:
    """One step.

    Attributes:
        state: what the requests have in common.
        num_tokens: tokens of requests; rows after them are padding.
        query_ends: where the queries of each request end, cumulative.
        seq_lens: length of each request with this step's tokens.
        block_table: ``[requests, columns]`` int32, contiguous.
        slots: ``[num_tokens]`` cache slots of the tokens, none negative.
        block_size: tokens in a cache block.
    """

    state: AttentionState
    num_tokens: int
    query_ends: list[int]
    seq_lens: list[int]
    block_table: Tensor
    slots: Tensor
    block_size: int
    _windows: dict[int, DecodeWindow] = field(default_factory=dict, repr=False)

    def decode_window(self, window: int) -> DecodeWindow:
        """Return the plan for layers of this window, made for the first of them."""
        if window not in self._windows:
            self._windows[window] = plan_decode_window(
                self.block_table, self.seq_lens, window, self.block_size
            )
        return self._windows[window]


def make_metadata(
    query_start: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    decode_queries: int = 1,
) -> AscendAttentionMetadata | None:
    """Return the metadata of a step; None for one without tokens.

    Requests without queries fill a batch up, as do tokens after the last request's.

    Args:
        query_start: ``requests + 1`` offsets of the requests in the query.
        seq_lens: ``requests`` lengths with this step's tokens.
        block_table: ``[>= requests, columns]``.
        slot_mapping: ``[>= tokens]``.
        block_size: tokens in a cache block.
        decode_queries: see :func:`state_of`.
    """
    query_lens = [end - begin for begin, end in pairwise(query_start)]
    kept = [request for request, queries in enumerate(query_lens) if queries]
    if not kept:
        return None
    counts, lengths = [query_lens[r] for r in kept], [seq_lens[r] for r in kept]
    table = block_table[: len(kept)]
    if kept[-1] >= len(kept):  # one without queries stands between others
        table = block_table[torch.tensor(kept, device=block_table.device)]
    tokens = query_start[-1]
    return AscendAttentionMetadata(
        state=state_of(counts, lengths, decode_queries),
        num_tokens=tokens,
        query_ends=list(accumulate(counts)),
        seq_lens=lengths,
        block_table=table.to(torch.int32).contiguous(),
        slots=slot_mapping[:tokens].clamp(min=NULL_SLOT),
        block_size=block_size,
    )


def plan_decode_window(
    block_table: Tensor, seq_lens: Sequence[int], window: int, block_size: int
) -> DecodeWindow:
    """Cut the block table to the blocks of the window and hide what lies before it.

    With one query a request the operator ignores its own window (``pre_tokens``), so that the
    window is made of what it does honour: lengths, block table and mask. A query sees the last
    ``window`` keys, its own included.
    """
    first = [max(0, length - window) // block_size for length in seq_lens]
    lengths = [n - block * block_size for n, block in zip(seq_lens, first, strict=True)]
    columns = -(-max(lengths) // block_size)
    device = block_table.device
    starts = torch.tensor(first, device=device)[:, None]
    wanted = (starts + torch.arange(columns, device=device)).clamp(max=block_table.shape[1] - 1)
    begins = torch.tensor([max(0, n - window) for n in lengths], device=device)[:, None]
    hidden = torch.arange(columns * block_size, device=device) < begins
    return DecodeWindow(block_table.gather(1, wanted), lengths, hidden[:, None, None, :])
