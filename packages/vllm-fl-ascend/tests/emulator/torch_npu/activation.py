"""Activations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torch_npu.library import kernel, require, require_floats


def _half(input: Tensor, dim: int = -1) -> Tensor:
    shape = list(input.shape)
    shape[dim] //= 2
    return input.new_empty(shape)


@kernel(_half)
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(A) * B, A and B the halves along ``dim``. docs: 1 to 8 dimensions."""
    require_floats("npu_swiglu", input)
    require(1 <= input.dim() <= 8, f"npu_swiglu: {input.dim()} dimensions")
    require(input.shape[dim] % 2 == 0, "npu_swiglu: the dimension cannot be halved")
    gate, up = input.float().chunk(2, dim=dim)
    return (functional.silu(gate) * up).to(input.dtype)


@kernel(lambda input, approximate="none": torch.empty_like(input))
def npu_gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """GELU. aclnnGeluV2: approximate "none" (erf) or "tanh"."""
    require_floats("npu_gelu", input)
    require(approximate in ("none", "tanh"), f"npu_gelu: approximate={approximate!r}")
    return functional.gelu(input.float(), approximate=approximate).to(input.dtype)
