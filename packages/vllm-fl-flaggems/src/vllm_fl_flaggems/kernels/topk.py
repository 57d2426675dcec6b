"""Softmax over the experts and the k largest of it, a few tokens a program.

The choice is by logit, which has the order of the probabilities and keeps its ties exact. Each of k
rounds takes the largest key of the row. A 16-bit logit has at most 19 leading bits in fp32, so that
the number of its expert fits into the same 32 bits: one reduction a round instead of two.
"""

# ruff: noqa: ANN001, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_fl_flaggems.kernels.launch import launch_options, wait_for_inputs
from vllm_fl_flaggems.kernels.order import LOWEST, from_key, to_key
from vllm_fl_flaggems.moe_tiles import TopkTile

_INDEX = tl.constexpr(0x1FFF)  # the 13 bits that hold an expert, inverted: the lower one is larger
_UNROLLED = tl.constexpr(16)  # rounds that are compiled one by one


@triton.jit
def _keys(x, column, E: tl.constexpr, PACKED: tl.constexpr):
    key = to_key(x)
    if PACKED:
        key = (key & ~_INDEX) | (~column & _INDEX)[None, :]
    return tl.where((column < E)[None, :], key, LOWEST)


@triton.jit
def _logit(key, PACKED: tl.constexpr):
    if PACKED:
        logit = from_key(tl.where(key < 0, key | _INDEX, key & ~_INDEX))
    else:
        logit = from_key(key)
    return logit


@triton.jit
def _take(key, column, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Return the keys without the largest of each row, its expert and its logit."""
    best = tl.max(key, axis=1)
    if PACKED:
        index = ~best & _INDEX
        taken = key == best[:, None]
    else:
        index = tl.min(tl.where(key == best[:, None], column[None, :], BLOCK), axis=1)
        taken = column[None, :] == index[:, None]
    return tl.where(taken, LOWEST, key), index, _logit(best, PACKED)


@triton.jit(do_not_specialize=["tokens"])
def _topk_softmax_kernel(
    weights,
    indices,
    places,
    logits,
    tokens,
    row_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PACKED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    inside = (row < tokens)[:, None] & (column < E)[None, :]
    source = logits + (row.to(tl.int64) * row_stride)[:, None] + column[None, :]
    x = tl.load(source, mask=inside, other=float("-inf")).to(tl.float32)
    key = _keys(x, column, E, PACKED)
    highest = _logit(tl.max(key, axis=1), PACKED)
    total = tl.sum(tl.exp(x - highest[:, None]), axis=1)
    chosen = tl.zeros((ROWS, SLOTS), tl.int32)
    values = tl.zeros((ROWS, SLOTS), tl.float32)
    if K <= _UNROLLED:
        for j in tl.static_range(K):
            key, index, logit = _take(key, column, BLOCK, PACKED)
            chosen = tl.where((slot == j)[None, :], index[:, None], chosen)
            values = tl.where((slot == j)[None, :], logit[:, None], values)
    else:
        for j in range(K):
            key, index, logit = _take(key, column, BLOCK, PACKED)
            chosen = tl.where((slot == j)[None, :], index[:, None], chosen)
            values = tl.where((slot == j)[None, :], logit[:, None], values)
    share = tl.exp(values - highest[:, None]) / total[:, None]
    if RENORMALIZE:
        share = share / tl.sum(tl.where((slot < K)[None, :], share, 0.0), axis=1)[:, None]
    target = (row.to(tl.int64) * K)[:, None] + slot[None, :]
    stored = (row < tokens)[:, None] & (slot < K)[None, :]
    tl.store(weights + target, share, mask=stored)
    tl.store(indices + target, chosen.to(indices.dtype.element_ty), mask=stored)
    tl.store(places + target, slot[None, :] * tokens + row[:, None], mask=stored)


def topk_softmax(
    weights: Tensor,
    indices: Tensor,
    places: Tensor,
    logits: Tensor,
    renormalize: bool,
    tile: TopkTile,
) -> None:
    """Write the k largest probabilities of each token and their experts.

    Args:
        weights: ``[tokens, k]`` fp32, contiguous, ``tokens`` > 0; overwritten.
        indices: likewise, int32 or int64.
        places: likewise, int32; ``j * tokens + t`` at ``[t, j]``.
        logits: ``[tokens, experts]``, fp16, bf16 or fp32, the last dimension contiguous.
        renormalize: whether to divide the weights by their sum.
        tile: how to cut the tokens.
    """
    tokens, experts = logits.shape
    _topk_softmax_kernel[(-(-tokens // tile.rows),)](
        weights,
        indices,
        places,
        logits,
        tokens,
        logits.stride(0),
        E=experts,
        K=weights.shape[1],
        ROWS=tile.rows,
        BLOCK=tile.block,
        SLOTS=tile.slots,
        PACKED=logits.itemsize == 2,
        RENORMALIZE=renormalize,
        num_warps=tile.warps,
        **launch_options(),
    )
