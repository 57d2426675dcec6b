"""Root-mean-square norms, plain and fused with the residual sum.

A program holds whole rows in registers: each element is read once and written once. How a row is
spread over the threads depends on its length alone, so that a row gives the same bits in every
batch.
"""

# ruff: noqa: ANN001, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_fl_flaggems.kernels.launch import launch_options, row_offset, wait_for_inputs
from vllm_fl_flaggems.tiles import NormTile


@triton.jit
def _normalise(total, scale, epsilon, N: tl.constexpr, GEMMA: tl.constexpr):
    """Return the normalised, scaled rows.

    Args:
        total: ``[rows, columns]`` fp32, zero beyond the row.
        scale: ``[columns]``, the weight.
        epsilon: added to the mean square.
        N: columns of the row.
        GEMMA: ``1 + weight`` in fp32, the product is left in fp32; otherwise the normalised value
            is rounded to the weight's dtype, and so is the product.
    """
    mean = tl.sum(total * total, axis=1) / N
    normed = total * tl.rsqrt(mean + epsilon)[:, None]
    wide = scale.to(tl.float32)[None, :]
    # One return: the compiler looks behind an early one, too, and finds another type there.
    if GEMMA:
        scaled = normed * (wide + 1.0)
    else:
        scaled = (normed.to(scale.dtype).to(tl.float32) * wide).to(scale.dtype)
    return scaled


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    out,
    x,
    weight,
    rows,
    inner,
    outer_stride,
    inner_stride,
    epsilon,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GEMMA: tl.constexpr,
    EVICTION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < N)[None, :]
    source = (x + row_offset(row, inner, outer_stride, inner_stride))[:, None] + column[None, :]
    total = tl.load(source, mask=inside, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    scale = tl.load(weight + column, mask=column < N, other=0.0)
    normed = _normalise(total, scale, epsilon, N, GEMMA)
    target = (out + row.to(tl.int64) * N)[:, None] + column[None, :]
    tl.store(target, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_kernel(
    out,
    residual_out,
    x,
    residual,
    weight,
    rows,
    inner,
    outer_stride,
    inner_stride,
    residual_inner,
    residual_outer_stride,
    residual_inner_stride,
    epsilon,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GEMMA: tl.constexpr,
    IN_PLACE: tl.constexpr,
    EVICTION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < N)[None, :]
    x_row = row_offset(row, inner, outer_stride, inner_stride)
    residual_row = row_offset(row, residual_inner, residual_outer_stride, residual_inner_stride)
    added = tl.load(
        (x + x_row)[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy=EVICTION
    )
    kept = tl.load(
        (residual + residual_row)[:, None] + column[None, :],
        mask=inside,
        other=0.0,
        eviction_policy=EVICTION,
    )
    scale = tl.load(weight + column, mask=column < N, other=0.0)
    if not IN_PLACE:
        x_row = row.to(tl.int64) * N
        residual_row = x_row
    # The unrounded sum is what gets normalised; the next layer gets it rounded.
    total = added.to(tl.float32) + kept.to(tl.float32)
    tl.store(
        (residual_out + residual_row)[:, None] + column[None, :],
        total.to(residual_out.dtype.element_ty),
        mask=inside,
    )
    normed = _normalise(total, scale, epsilon, N, GEMMA)
    tl.store((out + x_row)[:, None] + column[None, :], normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    layout: tuple[int, int, int],
    epsilon: float,
    gemma: bool,
    tile: NormTile,
) -> None:
    """Write the normalised rows of ``x`` to ``out``.

    Args:
        out: of ``x``'s shape and dtype, contiguous, with at least one element; overwritten.
        x: ``[..., n]``, the last dimension contiguous.
        weight: ``[n]``, contiguous.
        layout: where the rows of ``x`` lie, see :func:`~vllm_fl_flaggems.ops.layout.row_layout`.
        epsilon: added to the mean square.
        gemma: scale by ``1 + weight`` in fp32 and round once.
        tile: how many rows a program takes, and its size.
    """
    n = out.shape[-1]
    rows = out.numel() // n
    _rms_norm_kernel[(-(-rows // tile.rows),)](
        out,
        x,
        weight,
        rows,
        *layout,
        epsilon,
        N=n,
        ROWS=tile.rows,
        BLOCK=tile.block,
        GEMMA=gemma,
        EVICTION=tile.eviction,
        num_warps=tile.warps,
        **launch_options(),
    )


def add_rms_norm(
    outs: tuple[Tensor, Tensor] | None,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    layouts: tuple[int, int, int, int, int, int],
    epsilon: float,
    gemma: bool,
    tile: NormTile,
) -> None:
    """Write the sum and its normalised rows, to ``outs`` or over the inputs.

    Args:
        outs: for the normalised rows and the sum, contiguous, of ``x``'s shape; overwritten. None
            to overwrite ``x`` by the former and ``residual`` by the latter, whose rows must then
            not overlap.
        x: ``[..., n]``, the last dimension contiguous, with at least one element.
        residual: of ``x``'s shape and dtype, the last dimension contiguous.
        weight: ``[n]``, contiguous.
        layouts: where the rows of ``x`` and of ``residual`` lie.
        epsilon: added to the mean square.
        gemma: scale by ``1 + weight`` in fp32 and round once.
        tile: how many rows a program takes, and its size.
    """
    n = x.shape[-1]
    rows = x.numel() // n
    out, residual_out = (x, residual) if outs is None else outs
    _add_rms_norm_kernel[(-(-rows // tile.rows),)](
        out,
        residual_out,
        x,
        residual,
        weight,
        rows,
        *layouts,
        epsilon,
        N=n,
        ROWS=tile.rows,
        BLOCK=tile.block,
        GEMMA=gemma,
        IN_PLACE=outs is None,
        EVICTION=tile.eviction,
        num_warps=tile.warps,
        **launch_options(),
    )
