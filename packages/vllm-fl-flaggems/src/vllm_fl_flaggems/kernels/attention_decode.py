"""Attention of few query tokens of a request over the paged cache.

The keys of a request are split among programs, whose results a second kernel joins: flash-decoding
(Dao et al. 2023). Into how many parts depends on the number of requests and heads, not on lengths,
so that the grid may be captured in a CUDA graph; parts that a short request does not fill end at
once. The parts are joined in order, so that the same call gives the same bits.
"""

# ruff: noqa: ANN001, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fl_flaggems.kernels.attention import LOG2_E, LOWEST, attend, locate
from vllm_fl_flaggems.kernels.launch import launch_options, wait_for_inputs
from vllm_fl_flaggems.tiles import DecodeTile, power_of_2


@triton.jit
def _span(
    count,
    length,
    window,
    splits,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the first key, the first tile's key, and the keys of a part, a multiple of BLOCK_N."""
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(0, length - count - window + 1)
    first_tile = first_key // BLOCK_N * BLOCK_N
    tiles = (length - first_tile + BLOCK_N - 1) // BLOCK_N
    return first_key, first_tile, (tiles + splits - 1) // splits * BLOCK_N


# Metadata may be slices of vLLM's buffers that begin anywhere.
@triton.jit(
    do_not_specialize=["window", "splits", "table_stride"],
    do_not_specialize_on_alignment=["table", "query_start", "lengths", "causal"],
)
def _decode_kernel(
    out,
    parts,
    logs,
    query,
    keys,
    values,
    table,
    query_start,
    lengths,
    sinks,
    slopes,
    causal,
    window,
    splits,
    scale,
    cap,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    JOINED: tl.constexpr,
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
    kv_head = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    split = tl.program_id(1)
    request = tl.program_id(2)
    begin = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - begin
    length = tl.load(lengths + request)
    is_causal = 1
    if CAUSAL == 2:
        is_causal = tl.load(causal + request).to(tl.int32)
    first_key, first_tile, share = _span(count, length, window, splits, BLOCK_N, WINDOW)
    start = first_tile + split * share
    if (count > 0) & (count <= TOKENS) & (start < length):
        stop = tl.minimum(start + share, length)
        token, in_group, valid = locate(
            tl.arange(0, BLOCK_M), chunk, 0, count, HEADS, GROUP, BLOCK_M
        )
        row = (begin + token).to(tl.int64)
        head = kv_head * GROUP + in_group
        column = tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (column < D)[None, :]
        source = row * query_token_stride + head.to(tl.int64) * query_head_stride
        q = tl.load(query + source[:, None] + column[None, :], mask=inside, other=0.0)
        position = length - count + token
        accumulator = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        top = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        if SINKS & (not JOINED):
            top = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
            top = tl.maximum(top, LOWEST)
            total = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
        slope = total
        if ALIBI:
            slope = tl.load(slopes + head, mask=valid, other=0.0)
        keys += kv_head.to(tl.int64) * head_stride
        values += kv_head.to(tl.int64) * head_stride
        table += request.to(tl.int64) * table_stride
        # One loop, masked throughout: memory is the limit, and a second loop would drain the first.
        accumulator, top, total = attend(
            accumulator, top, total, q, keys, values, table,
            start, stop, first_key, stop,
            position, is_causal, window, scale, cap, slope, block_stride, token_stride,
            D, BLOCK_D, BLOCK_N, PAGE, CAUSAL, WINDOW, CAP, ALIBI, PRECISION,
        )  # fmt: skip
        # A row may see no key of its part.
        result = accumulator / tl.where(total > 0, total, 1.0)[:, None]
        if not JOINED:
            target = row * out_token_stride + head.to(tl.int64) * out_head_stride
            tl.store(
                out + target[:, None] + column[None, :],
                result.to(out.dtype.element_ty),
                mask=inside,
            )
        else:
            part = (request.to(tl.int64) * TOKENS + token) * (KV_HEADS * GROUP) + head
            part = part * splits + split
            tl.store(parts + part[:, None] * D + column[None, :], result, mask=inside)
            tl.store(logs + part, top + tl.log2(total), mask=valid)


@triton.jit(
    do_not_specialize=["window", "splits"],
    do_not_specialize_on_alignment=["query_start", "lengths"],
)
def _join_kernel(
    out,
    parts,
    logs,
    query_start,
    lengths,
    sinks,
    window,
    splits,
    out_token_stride,
    out_head_stride,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    head = tl.program_id(0)
    token = tl.program_id(1)
    request = tl.program_id(2)
    begin = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - begin
    length = tl.load(lengths + request)
    if (token < count) & (count <= TOKENS):
        _, first_tile, share = _span(count, length, window, splits, BLOCK_N, WINDOW)
        used = (length - first_tile + share - 1) // share
        split = tl.arange(0, BLOCK_S)
        column = tl.arange(0, BLOCK_D)
        part = ((request.to(tl.int64) * TOKENS + token) * HEADS + head) * splits + split
        log = tl.load(logs + part, mask=split < used, other=float("-inf"))
        there = (split < used)[:, None] & (column < D)[None, :]
        part_result = tl.load(parts + part[:, None] * D + column[None, :], mask=there, other=0.0)
        top = tl.max(log, axis=0)
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
            top = tl.maximum(top, sink)
        weight = tl.exp2(log - top)
        total = tl.sum(weight, axis=0)
        if SINKS:
            total += tl.exp2(sink - top)
        result = tl.sum(part_result * weight[:, None], axis=0) / total
        target = (begin + token).to(tl.int64) * out_token_stride + head * out_head_stride
        tl.store(out + target + column, result.to(out.dtype.element_ty), mask=column < D)


def variant_of(tile: DecodeTile) -> DecodeTile:
    """Return a tile that stands for all for which the kernels are compiled to the same code."""
    return replace(tile, splits=power_of_2(tile.splits))


def decode(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    causal: bool | Tensor,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    tile: DecodeTile,
) -> None:
    """Attend for the requests that have at most ``tile.tokens(group)`` query tokens.

    Args: as in :func:`~vllm_fl_flaggems.kernels.attention_prefill.prefill`.
    """
    heads, size = query.shape[1:]
    requests, kv_heads = lengths.shape[0], keys.shape[2]
    if not query.shape[0] or not requests:
        return
    group = heads // kv_heads
    of_a_token = min(group, tile.block_m)
    tokens, splits = tile.tokens(group), tile.splits
    parts = logs = None
    if splits > 1:
        rows = requests * tokens * heads * splits
        parts = torch.empty((rows, size), dtype=torch.float32, device=out.device)
        logs = torch.empty((rows,), dtype=torch.float32, device=out.device)
    by_request = isinstance(causal, Tensor)
    options = launch_options()
    _decode_kernel[(kv_heads * -(-group // of_a_token), splits, requests)](
        out,
        parts,
        logs,
        query,
        keys,
        values,
        table,
        query_start,
        lengths,
        sinks,
        slopes,
        causal if by_request else None,
        window or 0,
        splits,
        scale,
        cap or 0.0,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEADS=of_a_token,
        D=size,
        BLOCK_D=tile.block_d,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        JOINED=splits > 1,
        PAGE=keys.shape[1],
        CAUSAL=2 if by_request else int(causal),
        WINDOW=window is not None,
        CAP=cap is not None,
        SINKS=sinks is not None,
        ALIBI=slopes is not None,
        PRECISION="ieee" if query.element_size() == 4 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options,
    )
    if splits > 1:
        _join_kernel[(heads, tokens, requests)](
            out,
            parts,
            logs,
            query_start,
            lengths,
            sinks,
            window or 0,
            splits,
            out.stride(0),
            out.stride(1),
            TOKENS=tokens,
            HEADS=heads,
            D=size,
            BLOCK_D=tile.block_d,
            BLOCK_N=tile.block_n,
            BLOCK_S=power_of_2(splits),
            WINDOW=window is not None,
            SINKS=sinks is not None,
            num_warps=4,
            **options,
        )
