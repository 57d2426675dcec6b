"""Gated activations: ``act(gate) * up`` over the two halves of the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

GELU_APPROXIMATIONS = ("none", "tanh")


def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]``, the SwiGLU gate.

    Rounding order, that of vLLM's ``SiluAndMul.forward_native``: SiLU is rounded to ``x.dtype``,
    then the product is rounded to ``x.dtype``. Multiplying in fp32 and rounding once gives another
    result in about a quarter of random 16-bit elements (by one unit in the last place).

    Args:
        x: ``[..., 2 * d]``, gate half first; any floating dtype and strides; not modified.

    Returns:
        A new tensor ``[..., d]`` of ``x``'s dtype.

    Raises:
        ValueError: The last dimension is missing or odd.
    """
    gate, up = _halves("silu_and_mul", x)
    return functional.silu(gate) * up


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]``, the GeGLU gate.

    Rounding order, that of vLLM's ``GeluAndMul.forward_native``: GELU is rounded to ``x.dtype``,
    then the product is rounded to ``x.dtype``.

    Args:
        x: ``[..., 2 * d]``, gate half first; any floating dtype and strides; not modified.
        approximate: ``"none"`` for the error function, ``"tanh"`` for its tanh approximation.

    Returns:
        A new tensor ``[..., d]`` of ``x``'s dtype.

    Raises:
        ValueError: The last dimension is missing or odd, or ``approximate`` is unknown.
    """
    if approximate not in GELU_APPROXIMATIONS:
        allowed = " or ".join(repr(name) for name in GELU_APPROXIMATIONS)
        raise ValueError(f"gelu_and_mul: approximate must be {allowed}, got {approximate!r}")
    gate, up = _halves("gelu_and_mul", x)
    return functional.gelu(gate, approximate=approximate) * up


def _halves(op: str, x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"{op}: the last dimension must be even, got shape {tuple(x.shape)}")
    gate, up = torch.tensor_split(x, 2, dim=-1)
    return gate, up
