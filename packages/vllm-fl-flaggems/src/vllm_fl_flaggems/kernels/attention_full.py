"""A walk over tiles of cached keys of which every row sees every key: no masks.

The product of weights and values is left in flight, and ends with the scores of the next tile.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from vllm_fl_flaggems.kernels.attention import biased, softmax


@triton.jit
def _whole_pages(table, start, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Return the cache block of each key of a tile whose keys are all there."""
    if PAGE % BLOCK_N == 0:
        page = tl.load(table + start // PAGE)
    elif BLOCK_N % PAGE == 0:
        page = tl.load(table + tl.arange(0, BLOCK_N) // PAGE + start // PAGE)
    else:
        page = tl.load(table + (start + tl.arange(0, BLOCK_N)) // PAGE)
    return page


@triton.jit
def _tile(
    cache,
    page,
    start,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Return the keys or values of the tile that begins at ``start``."""
    column = tl.arange(0, BLOCK_D)[None, :]
    row = tl.arange(0, BLOCK_N).to(tl.int64)
    # What does not depend on the tile comes first, so that it is computed once.
    if PAGE % BLOCK_N == 0:
        place = cache + (row * TOKEN_STRIDE)[:, None] + column
        place += page.to(tl.int64) * BLOCK_STRIDE + start % PAGE * TOKEN_STRIDE
    elif BLOCK_N % PAGE == 0:
        place = cache + (row % PAGE * TOKEN_STRIDE)[:, None] + column
        place += (page.to(tl.int64) * BLOCK_STRIDE)[:, None]
    else:
        inner = (start + row) % PAGE * TOKEN_STRIDE
        place = cache + column + (page.to(tl.int64) * BLOCK_STRIDE + inner)[:, None]
    if D == BLOCK_D:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=column < D, other=0.0)
    return tile


@triton.jit
def attend_full(
    accumulator,
    top,
    total,
    query,
    keys,
    values,
    table,
    begin,
    end,
    position,
    scale,
    cap,
    slope,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As ``attention.attend``, of tiles of which every row sees every key; return the new state.

    Args:
        end: the end of the last tile, as a multiple of BLOCK_N, or anything up to ``begin``.
        BLOCK_STRIDE, TOKEN_STRIDE: elements from block to block and from token to token.
    """
    if begin < end:
        row = tl.arange(0, BLOCK_N)
        # The next tile's pages are read a tile ahead: its addresses are known when its loads start.
        page = _whole_pages(table, begin, BLOCK_N, PAGE)
        for start in range(begin, end, BLOCK_N):
            k = _tile(keys, page, start, BLOCK_STRIDE, TOKEN_STRIDE, D, BLOCK_D, BLOCK_N, PAGE)
            v = _tile(values, page, start, BLOCK_STRIDE, TOKEN_STRIDE, D, BLOCK_D, BLOCK_N, PAGE)
            page = _whole_pages(table, tl.minimum(start + BLOCK_N, end - BLOCK_N), BLOCK_N, PAGE)
            scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
            scores = biased(scores, start + row, position, scale, cap, slope, CAP, ALIBI)
            weights, top, shrink = softmax(scores, top, scale, CAP | ALIBI)
            total = total * shrink + tl.sum(weights, axis=1)
            accumulator = accumulator * shrink[:, None]
            accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision=PRECISION)
    return accumulator, top, total
