"""Sum over the experts of each token, in fp32, one program a piece of a row."""

# ruff: noqa: ANN001, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_fl_flaggems.kernels.launch import launch_options, wait_for_inputs
from vllm_fl_flaggems.moe_tiles import SumTile

_UNROLLED = tl.constexpr(16)  # addends that are loaded at once


@triton.jit
def _addend(x, j, column, choice_stride, N: tl.constexpr):
    source = x + tl.cast(j, tl.int64) * choice_stride + column
    return tl.load(source, mask=column < N, other=0.0).to(tl.float32)


@triton.jit
def _moe_sum_kernel(
    out,
    x,
    token_stride,
    choice_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
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
            total += _addend(x, j, column, choice_stride, N)
    else:
        for j in range(K):
            total += _addend(x, j, column, choice_stride, N)
    target = out + token.to(tl.int64) * N + column
    tl.store(target, total.to(out.dtype.element_ty), mask=column < N)


def moe_sum(out: Tensor, x: Tensor, tile: SumTile) -> None:
    """Write the sum over dimension 1.

    Args:
        out: ``[tokens, width]``, contiguous, with at least one element; overwritten.
        x: ``[tokens, k, width]`` of ``out``'s dtype, the last dimension contiguous.
        tile: how to cut the rows.
    """
    tokens, k, width = x.shape
    _moe_sum_kernel[(tokens * -(-width // tile.block),)](
        out,
        x,
        x.stride(0),
        x.stride(1),
        N=width,
        K=k,
        BLOCK=tile.block,
        num_warps=tile.warps,
        **launch_options(),
    )
