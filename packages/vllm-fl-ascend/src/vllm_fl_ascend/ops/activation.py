"""Gated activations."""

from __future__ import annotations

import torch_npu
from torch import Tensor

from vllm_fl_ascend.device import is_elsewhere

_MAX_DIMS = 8


def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]``, by ``npu_swiglu``."""
    out: Tensor = torch_npu.npu_swiglu(x.contiguous(), dim=-1)
    return out


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]``, by ``npu_gelu`` and a product.

    Not ``npu_geglu``: which half its ``activate_left`` activates is stated in opposite ways in
    CANN's pages before and since version 8.3. Not ``npu_gelu_mul``: it takes up to 1024 columns.
    """
    gate, up = x.chunk(2, dim=-1)
    activated: Tensor = torch_npu.npu_gelu(gate.contiguous(), approximate=approximate)
    return activated * up


def silu_and_mul_supports(x: Tensor) -> bool | str:
    """Whether ``npu_swiglu`` takes ``x``: 1 to 8 dimensions, the last one of two halves."""
    if is_elsewhere(x):
        return "x is not on an NPU"
    if not 1 <= x.dim() <= _MAX_DIMS:
        return f"x has {x.dim()} dimensions, not 1 to {_MAX_DIMS}"
    if x.numel() == 0:
        return "x is empty"
    if x.shape[-1] % 2:
        return f"{x.shape[-1]} columns are not two halves"
    return True


def gelu_and_mul_supports(x: Tensor, approximate: str = "none") -> bool | str:
    """Whether ``npu_gelu`` has ``approximate`` and takes ``x``."""
    if approximate not in ("none", "tanh"):
        return f"npu_gelu has no approximate={approximate!r}"
    return silu_and_mul_supports(x)
