"""Root-mean-square normalisation."""

from __future__ import annotations

import torch_npu
from torch import Tensor

from vllm_fl_ascend.device import is_elsewhere

_MIN_DIMS, _MAX_DIMS = 2, 8


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise ``x`` by ``npu_rms_norm``, or ``x + residual`` by ``npu_add_rms_norm``.

    Both return new tensors; of the latter's three results the sum comes last.
    """
    if residual is None:
        out: Tensor = torch_npu.npu_rms_norm(x.contiguous(), weight.contiguous(), epsilon)[0]
        return out
    normed, _, total = torch_npu.npu_add_rms_norm(
        x.contiguous(), residual.contiguous(), weight.contiguous(), epsilon
    )
    return normed, total


def gemma_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise ``x``, or ``x + residual``, by ``npu_gemma_rms_norm``, whose scale is 1 + weight.

    The sum with the residual is rounded to the dtype before it is normalised.
    """
    total = x if residual is None else x + residual
    out: Tensor = torch_npu.npu_gemma_rms_norm(total.contiguous(), weight.contiguous(), epsilon)[0]
    return out if residual is None else (out, total)


def rms_norm_supports(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> bool | str:
    """Whether the operators take the arguments: 2 to 8 dimensions, one dtype for all."""
    if is_elsewhere(x, residual, weight):
        return "x, the residual or the weight is not on an NPU"
    if not _MIN_DIMS <= x.dim() <= _MAX_DIMS:
        return f"x has {x.dim()} dimensions, not {_MIN_DIMS} to {_MAX_DIMS}"
    if x.numel() == 0:
        return "x is empty"
    if weight.dtype != x.dtype:
        return f"x is {x.dtype} and the weight {weight.dtype}"
    if weight.shape != x.shape[-1:]:
        return f"x has {x.shape[-1]} columns and the weight the shape {list(weight.shape)}"
    if residual is not None and residual.dtype != x.dtype:
        return f"x is {x.dtype} and the residual {residual.dtype}"
    if residual is not None and residual.shape != x.shape:
        return f"x has the shape {list(x.shape)} and the residual {list(residual.shape)}"
    return True


gemma_rms_norm_supports = rms_norm_supports
