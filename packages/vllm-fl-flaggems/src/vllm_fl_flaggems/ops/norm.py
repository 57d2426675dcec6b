"""rms_norm and gemma_rms_norm, with and without a residual."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vllm_fl_flaggems.kernels import norm as kernels
from vllm_fl_flaggems.ops import formulas
from vllm_fl_flaggems.ops.layout import overlaps, refusal, row_layout
from vllm_fl_flaggems.tiles import MAX_ROW, norm_tile

_WEIGHTS = (torch.float16, torch.bfloat16, torch.float32)


def supports(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> object:
    """Say whether the norms take these arguments."""
    reason = refusal(x)
    if reason:
        return reason
    n = x.shape[-1]
    if not 0 < n <= MAX_ROW:
        return f"rows of {n} elements are not between 1 and {MAX_ROW}"
    if weight.dim() != 1 or weight.shape[0] != n or weight.stride(0) != 1:
        return f"the weight is not a contiguous vector of {n} elements"
    if weight.dtype not in _WEIGHTS:
        return f"the weight has dtype {weight.dtype}"
    if residual is None:
        return True
    if residual.dtype != x.dtype or residual.shape != x.shape:
        return "the residual has another shape or dtype than x"
    reason = refusal(residual)
    return f"residual: {reason}" if reason else True


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise ``x``, or ``x + residual``, by its root mean square and scale it.

    Sum, statistics and normalised value are fp32; the unrounded sum is what gets normalised. The
    normalised value is rounded to the weight's dtype, multiplied by the weight in that dtype, and
    rounded to the dtype of ``x`` (vLLM ``RMSNorm``).

    Args:
        x: ``[..., n]``, fp16, bf16 or fp32, the last dimension contiguous. Overwritten by the
            first result when there is a residual and no two rows can overlap.
        residual: None, or of ``x``'s shape and dtype; overwritten with ``x``, by the sum.
        weight: ``[n]``.
        epsilon: added to the mean square.

    Returns:
        The normalised rows, new, or with a residual ``(normalised rows, sum)``.
    """
    if is_compiling():
        return formulas.rms_norm(x, residual, weight, epsilon, gemma=False)
    if residual is None:
        return _normed(x, weight, epsilon, gemma=False)
    return _add_normed(x, residual, weight, epsilon, gemma=False, donated=True)


def gemma_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise as :func:`rms_norm` does, and scale by ``1 + weight``.

    ``1 + weight`` and the product are fp32, rounded once to the dtype of ``x`` (vLLM
    ``GemmaRMSNorm``).

    Args: as in :func:`rms_norm`, but none is modified.

    Returns:
        As :func:`rms_norm`, in new tensors.
    """
    if is_compiling():
        return formulas.rms_norm(x, residual, weight, epsilon, gemma=True)
    if residual is None:
        return _normed(x, weight, epsilon, gemma=True)
    return _add_normed(x, residual, weight, epsilon, gemma=True, donated=False)


def _normed(x: Tensor, weight: Tensor, epsilon: float, gemma: bool) -> Tensor:
    out = x.new_empty(x.shape)
    if out.numel():
        tile = norm_tile(x.shape[-1])
        kernels.rms_norm(out, x, weight, row_layout(x), epsilon, gemma, tile)
    return out


def _add_normed(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, gemma: bool, donated: bool
) -> tuple[Tensor, Tensor]:
    """Overwrite ``x`` and ``residual`` if they are donated and it can be done."""
    n = x.shape[-1]
    x_layout, residual_layout = row_layout(x), row_layout(residual)
    outs = None
    if not donated or overlaps(x_layout, n) or overlaps(residual_layout, n):
        outs = x.new_empty(x.shape), residual.new_empty(x.shape)
    if x.numel():
        layouts = (*x_layout, *residual_layout)
        kernels.add_rms_norm(outs, x, residual, weight, layouts, epsilon, gemma, norm_tile(n))
    return (x, residual) if outs is None else outs
