"""Root-mean-square layer normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise ``x``, or ``x + residual``, by its root mean square and scale it.

    Rounding order, that of ``vllm.ir.ops.rms_norm`` and ``fused_add_rms_norm``:

    1. the sum with the residual, the mean square and the normalised value are fp32; the *unrounded*
       sum is what gets normalised;
    2. the normalised value is rounded to ``weight.dtype`` and multiplied by the weight in that
       dtype (so a fp32 weight keeps fp32 up to step 3);
    3. the product is rounded to ``x.dtype``.

    The new residual is the fp32 sum rounded to ``residual.dtype``. As in vLLM the sum of squares
    is fp32: rows of magnitude 1e18 and above overflow it.

    Args:
        x: ``[..., hidden]``, rank 1 or more, any floating dtype and strides; not modified.
        residual: Same shape as ``x``, or None; not modified.
        weight: ``[hidden]``, or None for no scaling.
        epsilon: Added to the mean square.

    Returns:
        ``out`` of ``x``'s shape and dtype; with a residual the pair ``(out, new_residual)``. All
        are new tensors.

    Raises:
        ValueError: Shapes do not fit together.
    """
    _check_shapes("rms_norm", x, residual, weight)
    total = _fp32_sum(x, residual)
    normed = _normalise(total, epsilon)
    if weight is not None:
        normed = normed.to(weight.dtype) * weight
    out = normed.to(x.dtype)
    return out if residual is None else (out, total.to(residual.dtype))


def gemma_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise ``x``, or ``x + residual``, and scale by ``1 + weight`` as Gemma models do.

    Rounding order, that of vLLM's ``GemmaRMSNorm.forward_native``: ``1 + weight`` is added in
    fp32 (a 16-bit sum would drop bits of the weight), everything stays fp32, and the product is
    rounded once to ``x.dtype``.

    Args:
        x: ``[..., hidden]``, rank 1 or more, any floating dtype and strides; not modified.
        residual: Same shape as ``x``, or None; not modified.
        weight: ``[hidden]``, the offset from a scale of one.
        epsilon: Added to the mean square.

    Returns:
        ``out`` of ``x``'s shape and dtype; with a residual the pair ``(out, new_residual)``, the
        latter of ``residual``'s dtype. All are new tensors.

    Raises:
        ValueError: Shapes do not fit together.
    """
    _check_shapes("gemma_rms_norm", x, residual, weight)
    total = _fp32_sum(x, residual)
    out = (_normalise(total, epsilon) * (weight.to(torch.float32) + 1.0)).to(x.dtype)
    return out if residual is None else (out, total.to(residual.dtype))


def _check_shapes(op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None) -> None:
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"{op}: residual must have the shape of x {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight must have shape {tuple(x.shape[-1:])}, got {tuple(weight.shape)}"
        )


def _fp32_sum(x: Tensor, residual: Tensor | None) -> Tensor:
    total = x.to(torch.float32)
    return total if residual is None else total + residual.to(torch.float32)


def _normalise(x: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon)
