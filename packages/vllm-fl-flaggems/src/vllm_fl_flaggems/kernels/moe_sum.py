"""Sum over the experts of each token, in fp32, one program a piece of a row."""

# ruff: noqa: ANN001, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_fl_flaggems.kernels.align import Choices, expert_of
from vllm_fl_flaggems.kernels.launch import launch_options, wait_for_inputs
from vllm_fl_flaggems.moe_tiles import SumTile

_UNROLLED = tl.constexpr(16)  # addends that are loaded at once


@triton.jit
def _addend(
    x,
    ids,
    expert_map,
    token,
    j,
    column,
    choice_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    RANGE: tl.constexpr,
    E: tl.constexpr,
    MAPPED: tl.constexpr,
    CHECKED: tl.constexpr,
):
    width = N
    if CHECKED:
        position = token.to(tl.int64) * K + j
        expert = expert_of(ids, expert_map, position, token >= 0, RANGE, E, MAPPED)
        width = tl.where(expert >= 0, N, 0)
    source = x + tl.cast(j, tl.int64) * choice_stride + column
    return tl.load(source, mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def _moe_sum_kernel(
    out,
    x,
    ids,
    expert_map,
    token_stride,
    choice_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    RANGE: tl.constexpr,
    E: tl.constexpr,
    MAPPED: tl.constexpr,
    CHECKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    tiles: tl.constexpr = (N + BLOCK - 1) // BLOCK
    token = tl.program_id(0) // tiles
    column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    x += token.to(tl.int64) * token_stride
    total = tl.zeros((BLOCK,), tl.float32)
    if K <= _UNROLLED:
        for j in tl.static_range(K):
            total += _addend(
                x, ids, expert_map, token, j, column, choice_stride, N, K, RANGE, E, MAPPED,
                CHECKED,
            )  # fmt: skip
    else:
        for j in range(K):
            total += _addend(
                x, ids, expert_map, token, j, column, choice_stride, N, K, RANGE, E, MAPPED,
                CHECKED,
            )  # fmt: skip
    target = out + token.to(tl.int64) * N + column
    tl.store(target, total.to(out.dtype.element_ty), mask=column < N)


def moe_sum(out: Tensor, x: Tensor, choices: Choices | None, tile: SumTile) -> None:
    """Write the sum over dimension 1.

    Args:
        out: ``[tokens, width]``, contiguous, with at least one element; overwritten.
        x: ``[tokens, k, width]`` of ``out``'s dtype, the last dimension contiguous.
        choices: whose ``ids [tokens, k]`` say which addends count; the others are not read. None
            for all.
        tile: how to cut the rows.
    """
    tokens, k, width = x.shape
    expert_map = None if choices is None else choices.expert_map
    _moe_sum_kernel[(tokens * -(-width // tile.block),)](
        out,
        x,
        x if choices is None else choices.ids,
        x if expert_map is None else expert_map,
        x.stride(0),
        x.stride(1),
        N=width,
        K=k,
        BLOCK=tile.block,
        RANGE=0 if choices is None else choices.range,
        E=0 if choices is None else choices.experts,
        MAPPED=expert_map is not None,
        CHECKED=choices is not None,
        num_warps=tile.warps,
        **launch_options(),
    )
