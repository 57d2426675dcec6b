"""Attention of many query tokens of a request over the paged cache.

One program a block of query rows and key/value head. Which request a block belongs to is found on
the device, so that the grid depends on the number of tokens and requests alone and may be captured
in a CUDA graph. Blocks with the most keys start first, of as many heads as the L2 cache holds keys
and values of, so that all end together.
"""

# ruff: noqa: ANN001, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_fl_flaggems.kernels.attention import LOG2_E, LOWEST, attend, locate
from vllm_fl_flaggems.kernels.attention_full import attend_full
from vllm_fl_flaggems.kernels.launch import launch_options, register_limit, wait_for_inputs
from vllm_fl_flaggems.tiles import AttentionTile, heads_together

_SEARCHED = tl.constexpr(256)  # requests that a step of the search looks at


@triton.jit
def _request_of(block, query_start, requests, TOKENS: tl.constexpr):
    """Return the request that a block of query tokens belongs to.

    Request r has the blocks from ``query_start[r] // TOKENS + r`` on, one at least too many.
    """
    request = 0
    for first in range(0, requests, _SEARCHED):
        index = first + tl.arange(0, _SEARCHED)
        inside = index < requests
        stop = tl.load(query_start + index + 1, mask=inside, other=0) // TOKENS + index + 1
        request += tl.sum((inside & (stop <= block)).to(tl.int32), axis=0)
    return request


# Metadata may be slices of vLLM's buffers that begin anywhere.
@triton.jit(
    do_not_specialize=["blocks", "requests", "together", "shorter", "window", "table_stride"],
    do_not_specialize_on_alignment=["table", "query_start", "lengths", "causal"],
)
def _prefill_kernel(
    out,
    query,
    keys,
    values,
    table,
    query_start,
    lengths,
    sinks,
    slopes,
    causal,
    blocks,
    requests,
    together,
    shorter,
    window,
    scale,
    cap,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    head_stride,
    table_stride,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    program = tl.program_id(0)
    turn = program // (blocks * together * CHUNKS)
    program -= turn * (blocks * together * CHUNKS)
    block = blocks - 1 - program // (together * CHUNKS)
    kv_head = turn * together + program // CHUNKS % together
    chunk = program % CHUNKS
    request = _request_of(block, query_start, requests, TOKENS)
    known = request < requests
    begin = tl.load(query_start + request, mask=known, other=0)
    count = tl.load(query_start + request + 1, mask=known, other=0) - begin
    first = (block - (begin // TOKENS + request)) * TOKENS
    if (first < count) & (count > shorter):
        length = tl.load(lengths + request)
        is_causal = 1
        if CAUSAL == 2:
            is_causal = tl.load(causal + request).to(tl.int32)
        row = tl.arange(0, BLOCK_M)
        token, head, valid = locate(row, chunk, first, count, HEADS, GROUP, BLOCK_M)
        head = kv_head * GROUP + head
        column = tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (column < D)[None, :]
        source = (begin + token).to(tl.int64) * query_token_stride
        source += head.to(tl.int64) * query_head_stride
        q = tl.load(query + source[:, None] + column[None, :], mask=inside, other=0.0)

        context = length - count
        position = context + token
        low = context + first
        high = low + TOKENS - 1
        end_key = length
        end_full = length
        if CAUSAL == 1:
            end_key = tl.minimum(length, high + 1)
            end_full = tl.minimum(length, low + 1)
        if CAUSAL == 2:
            end_key = tl.where(is_causal != 0, tl.minimum(length, high + 1), length)
            end_full = tl.where(is_causal != 0, tl.minimum(length, low + 1), length)
        first_key = 0
        first_full = 0
        if WINDOW:
            first_key = tl.maximum(0, low - window + 1)
            first_full = tl.maximum(0, high - window + 1)
            if CAUSAL != 1:
                end_key = tl.minimum(end_key, high + window)
                end_full = tl.minimum(end_full, low + window)
        # Tiles in which every row sees every key, and those before and after them.
        first_tile = first_key // BLOCK_N * BLOCK_N
        full = (first_full + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        after = tl.maximum(end_full // BLOCK_N * BLOCK_N, full)

        accumulator = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        top = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        if SINKS:
            top = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
            top = tl.maximum(top, LOWEST)
            total = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
        slope = total
        if ALIBI:
            slope = tl.load(slopes + head, mask=valid, other=0.0)
        keys += kv_head.to(tl.int64) * head_stride
        values += kv_head.to(tl.int64) * head_stride
        table += request.to(tl.int64) * table_stride
        if WINDOW:
            accumulator, top, total = attend(
                accumulator, top, total, q, keys, values, table,
                first_tile, tl.minimum(full, end_key), first_key, end_key,
                position, is_causal, window, scale, cap, slope, BLOCK_STRIDE, TOKEN_STRIDE,
                D, BLOCK_D, BLOCK_N, PAGE, CAUSAL, WINDOW, CAP, ALIBI, PRECISION,
            )  # fmt: skip
        accumulator, top, total = attend(
            accumulator, top, total, q, keys, values, table,
            after, end_key, first_key, end_key,
            position, is_causal, window, scale, cap, slope, BLOCK_STRIDE, TOKEN_STRIDE,
            D, BLOCK_D, BLOCK_N, PAGE, CAUSAL, WINDOW, CAP, ALIBI, PRECISION,
        )  # fmt: skip
        accumulator, top, total = attend_full(
            accumulator, top, total, q, keys, values, table,
            full, after, position, scale, cap, slope, BLOCK_STRIDE, TOKEN_STRIDE,
            D, BLOCK_D, BLOCK_N, PAGE, CAP, ALIBI, PRECISION,
        )  # fmt: skip
        result = accumulator / total[:, None]
        # Where the rows go is worked out again, from numbers that are known only now: kept since
        # the query was read, it would take the registers that the products need. No total is below
        # zero.
        row += (total < 0).to(tl.int32)
        token, head, valid = locate(row, chunk, first, count, HEADS, GROUP, BLOCK_M)
        head = kv_head * GROUP + head
        target = (begin + token).to(tl.int64) * out_token_stride
        target += head.to(tl.int64) * out_head_stride
        tl.store(
            out + target[:, None] + column[None, :],
            result.to(out.dtype.element_ty),
            mask=valid[:, None] & (column < D)[None, :],
        )


def prefill(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    shorter: int,
    most: int,
    causal: bool | Tensor,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    tile: AttentionTile,
) -> None:
    """Attend for the requests that have more than ``shorter`` query tokens.

    Args:
        out: ``[tokens, heads, D]``, contiguous last dimension; rows of such requests are written.
        query: ``[tokens, heads, D]``, contiguous last dimension.
        keys, values: ``[blocks, block_size, kv_heads, D]``, equal strides, contiguous last
            dimension; ``heads`` is a multiple of ``kv_heads``.
        table: ``[requests, columns]`` int32, contiguous last dimension.
        query_start: ``[requests + 1]`` int32; on the device, as all that follows.
        lengths: ``[requests]`` int32, tokens of a request with those of the query.
        scale: factor on the scores, positive.
        shorter: see above; 0 for every request.
        most: query tokens of the longest query, or an upper bound; results do not depend on it.
        causal: for all requests, or ``[requests]``, of which non-zero means causal.
        window: keys that a query sees on each side, its own included; None for all.
        cap: bound of the scores, or None.
        sinks: ``[heads]``, one more logit each, or None.
        slopes: ``[heads]`` fp32 of ALiBi, or None.
        tile: how to cut the work.
    """
    tokens, heads, size = query.shape
    requests, kv_heads = lengths.shape[0], keys.shape[2]
    if not tokens or not requests:
        return
    group = heads // kv_heads
    of_a_token = min(group, tile.block_m)
    blocks = tokens // (tile.block_m // of_a_token) + requests
    by_request = isinstance(causal, Tensor)
    _prefill_kernel[(blocks * kv_heads * -(-group // of_a_token),)](
        out,
        query,
        keys,
        values,
        table,
        query_start,
        lengths,
        sinks,
        slopes,
        causal if by_request else None,
        blocks,
        requests,
        heads_together(kv_heads, 2 * min(most, tokens) * size * query.element_size()),
        shorter,
        window or 0,
        scale,
        cap or 0.0,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        keys.stride(2),
        table.stride(0),
        BLOCK_STRIDE=keys.stride(0),
        TOKEN_STRIDE=keys.stride(1),
        GROUP=group,
        HEADS=of_a_token,
        D=size,
        BLOCK_D=tile.block_d,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        PAGE=keys.shape[1],
        CAUSAL=2 if by_request else int(causal),
        WINDOW=window is not None,
        CAP=cap is not None,
        SINKS=sinks is not None,
        ALIBI=slopes is not None,
        PRECISION="ieee" if query.element_size() == 4 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **register_limit(tile.registers),
        **launch_options(),
    )
