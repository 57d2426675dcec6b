"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl_cuda.layout import is_aligned, is_elsewhere

# Blackwell's variant of the kernel reads 32 bytes at a time.
_VECTOR_BYTES = 32


def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]``, by vLLM's kernel ``_C::silu_and_mul``."""
    out = _output(x)
    torch.ops._C.silu_and_mul(out, x)
    return out


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]``, by the ``_C`` kernel for ``approximate``."""
    out = _output(x)
    if approximate == "none":
        torch.ops._C.gelu_and_mul(out, x)
    else:
        torch.ops._C.gelu_tanh_and_mul(out, x)
    return out


def silu_and_mul_supports(x: Tensor) -> bool | str:
    """Whether the kernel takes ``x``: it walks the rows by their length, whatever the strides."""
    if is_elsewhere(x):
        return "x is not on a CUDA device"
    if not x.is_contiguous():
        return "x is not contiguous"
    if not is_aligned(x, x.shape[-1] // 2, _VECTOR_BYTES):
        return "x does not start at a multiple of the kernel's vector"
    return True


def gelu_and_mul_supports(x: Tensor, approximate: str = "none") -> bool | str:
    """Whether there is a kernel for ``approximate`` and it takes ``x``."""
    if approximate not in ("none", "tanh"):
        return f"there is no kernel for approximate={approximate!r}"
    return silu_and_mul_supports(x)


def _output(x: Tensor) -> Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
