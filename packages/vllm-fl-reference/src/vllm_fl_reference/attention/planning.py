"""Index work of paged attention: done once per step and shared by every layer.

A step is a batch of requests, each with some new query tokens and a history in the cache. The
planner cuts long queries into pieces, groups pieces of similar size and turns each group into a
`Tile`: rectangular index tensors that one batched matrix product can work on. Grouping bounds the
padding (a long request does not stretch short ones), cutting bounds the score matrix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TileLimits:
    """Upper bounds for one tile; they trade memory for fewer, larger matrix products.

    Attributes:
        scores: Query-key pairs, counted per head: at most this many elements of the mask, and this
            many fp32 scores per query head.
        keys: Cache tokens gathered at once, unless a single request has more.
        queries: Query tokens of one request.
        min_queries: Floor for the piece length, so that a very long history is not gathered again
            for every few queries; it takes precedence over ``scores``.
    """

    scores: int = 1 << 19
    keys: int = 1 << 15
    queries: int = 512
    min_queries: int = 32


DEFAULT_LIMITS = TileLimits()


@dataclass(frozen=True)
class Tile:
    """``R`` pieces of ``T`` query tokens that look at ``N`` cache blocks each.

    Attributes:
        shape: ``(R, T, N)``.
        query_rows: ``[R * T]`` int64 rows of the query; short pieces repeat their last row.
        output_rows: ``[R * T]`` or, if there are repeated rows, the int64 rows without repeats.
        kept: Which of the ``R * T`` results go to ``output_rows``; None for all of them.
        blocks: ``[R * N]`` int64 block numbers; pieces with few blocks repeat their last one.
        mask: ``[R, T, N * block_size]`` bool, True where the query may attend to the key.
        hidden_keys: int64 rows of the gathered ``[R * N * block_size]`` keys that no query may
            attend to (unwritten slots, freed blocks). Their content is arbitrary, NaN included.
        query_positions: ``[R, T]`` int64 positions in the request.
        key_positions: ``[R, N * block_size]`` int64 positions in the request.
    """

    shape: tuple[int, int, int]
    query_rows: Tensor
    output_rows: Tensor
    kept: Tensor | None
    blocks: Tensor
    mask: Tensor
    hidden_keys: Tensor
    query_positions: Tensor
    key_positions: Tensor


@dataclass(frozen=True)
class CacheSlots:
    """Where new keys and values go; see `plan_cache_write`.

    Attributes:
        rows: int64 rows of key and value to store; None for all of them.
        blocks: int64 block number of each stored row.
        offsets: int64 offset in that block.
        num_rows: Number of rows of key and value that the slots were given for.
    """

    rows: Tensor | None
    blocks: Tensor
    offsets: Tensor
    num_rows: int


@dataclass(frozen=True)
class _Piece:
    """Some consecutive query tokens of one request and the cache range they can see."""

    request: int
    causal: bool
    row: int
    length: int
    position: int
    first_block: int
    num_blocks: int
    seq_len: int


def plan_cache_write(slot_mapping: Tensor, block_size: int) -> CacheSlots:
    """Split slots into block and offset, leaving out padding.

    Args:
        slot_mapping: ``[tokens]`` integers, ``block * block_size + offset``; negative = padding.
        block_size: Tokens in a cache block.

    Returns:
        The plan for `write_kv_cache`. Arithmetic is int64, whatever the input's type.
    """
    slots = slot_mapping.to(torch.int64)
    rows = (slots >= 0).nonzero().flatten()
    if rows.numel() == slots.numel():
        kept = None
    else:
        kept, slots = rows, slots.index_select(0, rows)
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    return CacheSlots(kept, blocks, slots - blocks * block_size, slot_mapping.numel())


def plan_attention(
    query_start: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Tensor,
    block_size: int,
    *,
    window: int | None = None,
    causal: bool | Sequence[bool] = True,
    limits: TileLimits = DEFAULT_LIMITS,
) -> tuple[Tile, ...]:
    """Plan attention for one step.

    The queries of a request are the *last* tokens of its sequence: the query token ``i`` of ``n``
    has position ``seq_len - n + i``, and keys have positions ``0 .. seq_len - 1``.

    Args:
        query_start: ``requests + 1`` offsets of the requests in the query.
        seq_lens: Length of each request's sequence, its query tokens included.
        block_table: ``[requests, columns]`` integer block numbers. Columns past a request's last
            block are not read.
        block_size: Tokens in a cache block.
        window: Sliding window as vLLM counts it, the current token included: a query at ``p`` sees
            keys ``p - window + 1 .. p``. Without causality also ``p + 1 .. p + window - 1``.
        causal: Whether queries are blind to later keys; one answer for all requests or one each.
        limits: Size bounds of one tile.

    Returns:
        Tiles whose output rows cover each query row once. Requests without queries are left out.

    Raises:
        ValueError: A request has more queries than its sequence has tokens, or the window is not
            positive.
    """
    if window is not None and window < 1:
        raise ValueError(f"the sliding window counts the current token: at least 1, got {window}")
    flags = [causal] * len(seq_lens) if isinstance(causal, bool) else causal
    pieces = _cut(query_start, seq_lens, flags, block_size, window, limits)
    return tuple(
        _tile(group, block_table, block_size, window)
        for group in _group(pieces, block_size, limits)
    )


def _cut(
    query_start: Sequence[int],
    seq_lens: Sequence[int],
    causal: Sequence[bool],
    block_size: int,
    window: int | None,
    limits: TileLimits,
) -> Iterator[_Piece]:
    for request, seq_len in enumerate(seq_lens):
        begin, end = query_start[request], query_start[request + 1]
        context = seq_len - (end - begin)
        if end > begin and context < 0:
            raise ValueError(
                f"request {request} has {end - begin} query tokens but a sequence of {seq_len}"
            )
        visible = seq_len if window is None else min(seq_len, window + limits.min_queries)
        step = min(limits.queries, max(limits.min_queries, limits.scores // max(visible, 1)))
        for row in range(begin, end, step):
            length = min(step, end - row)
            position = context + row - begin
            first_key, end_key = 0, seq_len
            if window is not None:
                first_key = max(0, position - window + 1)
                end_key = min(seq_len, position + length + window - 1)
            if causal[request]:
                end_key = min(end_key, position + length)
            first_block = first_key // block_size
            num_blocks = -(-end_key // block_size) - first_block
            yield _Piece(
                request, causal[request], row, length, position, first_block, num_blocks, seq_len
            )


def _group(pieces: Iterable[_Piece], block_size: int, limits: TileLimits) -> Iterator[list[_Piece]]:
    """Group pieces whose lengths agree within a factor of two, then split by the limits."""
    groups: dict[tuple[bool, int, int], list[_Piece]] = defaultdict(list)
    for piece in pieces:
        key = (piece.causal, (piece.length - 1).bit_length(), (piece.num_blocks - 1).bit_length())
        groups[key].append(piece)
    for group in groups.values():
        queries = max(piece.length for piece in group)
        keys = block_size * max(piece.num_blocks for piece in group)
        rows = max(1, min(limits.keys // keys, limits.scores // (queries * keys)))
        for start in range(0, len(group), rows):
            yield group[start : start + rows]


def _tile(pieces: list[_Piece], block_table: Tensor, block_size: int, window: int | None) -> Tile:
    device = block_table.device
    table = torch.tensor(
        [
            (p.request, p.row, p.length, p.position, p.first_block, p.num_blocks, p.seq_len)
            for p in pieces
        ],
        dtype=torch.int64,
    ).to(device)
    request, row, length, position, first_block, num_blocks, seq_len = table[:, :, None].unbind(1)
    queries = max(piece.length for piece in pieces)
    columns = max(piece.num_blocks for piece in pieces)

    query = torch.arange(queries, device=device)
    clamped = torch.minimum(query, length - 1)
    query_rows = (row + clamped).flatten()
    query_positions = position + clamped
    kept, output_rows = None, query_rows
    if any(piece.length < queries for piece in pieces):
        kept = (query < length).flatten().nonzero().flatten()
        output_rows = query_rows.index_select(0, kept)

    column = first_block + torch.minimum(torch.arange(columns, device=device), num_blocks - 1)
    blocks = block_table[request, column].to(torch.int64).flatten()
    key_positions = first_block * block_size + torch.arange(columns * block_size, device=device)
    # Positions of repeated blocks lie past whatever bounded the piece's range (end of the sequence,
    # causality or window), so the same test hides them.
    mask = (key_positions < seq_len)[:, None, :]
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    if pieces[0].causal:
        mask = mask & (distance >= 0)
    if window is not None:
        mask = mask & (distance.abs() < window)
    mask = mask.expand(len(pieces), queries, columns * block_size)
    return Tile(
        shape=(len(pieces), queries, columns),
        query_rows=query_rows,
        output_rows=output_rows,
        kept=kept,
        blocks=blocks,
        mask=mask,
        hidden_keys=(~mask.any(dim=1)).flatten().nonzero().flatten(),
        query_positions=query_positions,
        key_positions=key_positions,
    )
