"""What the attention kernels have in common: rows of queries, and a walk over cached keys.

A program holds ``BLOCK_M`` rows. A row is one query head of one query token; the query heads that
share a key/value head stand together, ``HEADS`` of them to a token, so that each key is read once
for all of them. The walk is flash attention's: a running maximum, a running sum and an accumulator
in fp32, in units of log 2 (Dao et al. 2022, arXiv:2205.14135).

Keys lie in cache blocks ("pages") that the block table names. Hidden keys, of slots that hold
nothing or of blocks given back, are never read: whatever they hold, NaN included, stays out.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
"""Where maxima start: below every score, and finite, so that differences are numbers."""

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def locate(
    row, index, start, length, HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return token in the request, head in the group, and validity of each row of a program.

    Args:
        row: ``[BLOCK_M]``, from 0 on.
        index: number of the program's head chunk.
        start: the program's first token in the request.
        length: query tokens of the request.
        HEADS: heads of a token in a program.
        GROUP: query heads of a key/value head.
        BLOCK_M: rows.
    """
    token = start + row // HEADS
    head = index * HEADS + row % HEADS
    valid = (row < BLOCK_M // HEADS * HEADS) & (token < length) & (head < GROUP)
    return token, head, valid


@triton.jit
def _pages(table, start, key, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Return the cache block of each key of a tile, one number where a block holds the tile."""
    if PAGE % BLOCK_N == 0:
        page = tl.load(table + start // PAGE)
    else:
        page = tl.load(table + key // PAGE)
    return page


@triton.jit
def biased(scores, key, position, scale, cap, slope, CAP: tl.constexpr, ALIBI: tl.constexpr):
    """Return a tile's scores with their bound and bias, then times scale and log2(e)."""
    if CAP:
        # tanh(x) is 1 - 2 / (exp(2x) + 1).
        capped = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E * scale / cap)) + 1.0)
        scores = capped * (cap * LOG2_E)
    if ALIBI:
        if not CAP:
            scores = scores * (scale * LOG2_E)
        distance = tl.abs(position[:, None] - key[None, :]).to(tl.float32)
        scores = scores - slope[:, None] * LOG2_E * distance
    return scores


@triton.jit
def softmax(scores, top, scale, SCALED: tl.constexpr):
    """Return the weights of a tile, the new maximum, and the factor on what came before.

    Args:
        scores: ``[rows, keys]``.
        top: ``[rows]``, largest score so far, times log2(e).
        scale: factor on the scores, positive; with log2(e) in them already if SCALED.
    """
    # The scale is applied in the subtraction, one multiply-add, where nothing stands between.
    if SCALED:
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
    else:
        new_top = tl.maximum(top, tl.max(scores, axis=1) * (scale * LOG2_E))
        weights = tl.exp2(scores * (scale * LOG2_E) - new_top[:, None])
    return weights, new_top, tl.exp2(top - new_top)


@triton.jit
def attend(
    accumulator,
    top,
    total,
    query,
    keys,
    values,
    table,
    begin,
    end,
    first_key,
    end_key,
    position,
    is_causal,
    window,
    scale,
    cap,
    slope,
    block_stride,
    token_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to the keys of the tiles that begin in ``[begin, end)``; return the new state.

    Rows need not see every key of these tiles.

    Args:
        accumulator: ``[rows, BLOCK_D]`` fp32, weighted sum of the values so far.
        top: ``[rows]``, largest score so far, times log2(e).
        total: ``[rows]``, sum of the weights so far.
        query: ``[rows, BLOCK_D]``.
        keys, values: pointers to the head's first key and value; equal strides.
        table: pointer to the request's row of the block table.
        begin: a multiple of BLOCK_N.
        end: where no tile begins any more.
        first_key, end_key: keys outside are not read; ``begin`` lies below ``end_key``, or there
            is no tile.
        position: ``[rows]`` of the queries.
        is_causal: the request's flag (CAUSAL 2 only).
        window: keys that a query sees on each side, its own included (WINDOW only).
        scale: factor on the scores, positive.
        cap: bound of the scores (CAP only).
        slope: ``[rows]`` (ALIBI only).
        block_stride, token_stride: elements from block to block and from token to token.
        PAGE: tokens of a cache block.
        CAUSAL: 0 no, 1 yes, 2 as ``is_causal`` says.
    """
    column = tl.arange(0, BLOCK_D)
    row = tl.arange(0, BLOCK_N)
    # Keys outside are read as the nearest inside: that needs fewer registers than a mask.
    nearest = tl.maximum(first_key, tl.minimum(begin + row, end_key - 1))
    # The next tile's pages are read a tile ahead: its addresses are known when its loads start.
    page = _pages(table, begin, nearest, BLOCK_N, PAGE)
    for start in range(begin, end, BLOCK_N):
        key = start + row
        nearest = tl.maximum(first_key, tl.minimum(key, end_key - 1))
        offset = page.to(tl.int64) * block_stride + (nearest % PAGE).to(tl.int64) * token_stride
        ahead = tl.minimum(key + BLOCK_N, end_key - 1)
        page = _pages(table, tl.minimum(start + BLOCK_N, end_key - 1), ahead, BLOCK_N, PAGE)
        where = offset[:, None] + column[None, :]
        if D == BLOCK_D:
            k = tl.load(keys + where)
            v = tl.load(values + where)
        else:
            k = tl.load(keys + where, mask=(column < D)[None, :], other=0.0)
            v = tl.load(values + where, mask=(column < D)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        scores = biased(scores, key, position, scale, cap, slope, CAP, ALIBI)
        seen = (key < end_key)[None, :] & (key >= first_key)[None, :]
        if CAUSAL == 1:
            seen = seen & (key[None, :] <= position[:, None])
        if CAUSAL == 2:
            seen = seen & ((key[None, :] <= position[:, None]) | (is_causal == 0))
        if WINDOW:
            seen = seen & (position[:, None] - key[None, :] < window)
            if CAUSAL != 1:
                seen = seen & (key[None, :] - position[:, None] < window)
        scores = tl.where(seen, scores, float("-inf"))
        weights, top, shrink = softmax(scores, top, scale, CAP | ALIBI)
        total = total * shrink + tl.sum(weights, axis=1)
        accumulator = accumulator * shrink[:, None]
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision=PRECISION)
    return accumulator, top, total
