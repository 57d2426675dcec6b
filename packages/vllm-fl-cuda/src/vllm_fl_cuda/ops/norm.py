"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl_cuda.layout import is_aligned, is_elsewhere


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise ``x`` by ``_C::rms_norm``, or ``x + residual`` by ``_C::fused_add_rms_norm``.

    The latter writes both results over its arguments, which the operator donates.
    """
    if residual is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out
    torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
    return x, residual


def rms_norm_supports(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> bool | str:
    """Whether the kernels take the arguments.

    vLLM itself asks for equal dtypes alone (``vllm/kernels/vllm_c.py``); its callers keep the rest.
    """
    if is_elsewhere(x):
        return "x is not on a CUDA device"
    if weight.dtype != x.dtype:
        return f"x is {x.dtype} and the weight {weight.dtype}"
    if not 2 <= x.dim() <= 4:
        return f"x has {x.dim()} dimensions, not 2 to 4"
    if x.numel() == 0:
        return "x is empty"
    if x.stride(-1) != 1 or not weight.is_contiguous():
        return "the rows of x, or the weight, are not contiguous"
    if residual is None:
        if is_aligned(x, x.shape[-1]) and is_aligned(weight, x.shape[-1]):
            return True
        return "a row of x, or the weight, does not start at a multiple of the kernel's vector"
    if residual.dtype != x.dtype or not residual.is_contiguous():
        return "the residual differs from x in dtype, or is not contiguous"
    if x.dim() > 2 and not x.is_contiguous():
        return "x has more than 2 dimensions and is not contiguous"
    return True
