"""silu_and_mul and gelu_and_mul."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from vllm_fl_flaggems.kernels.activation import gated_activation
from vllm_fl_flaggems.ops import formulas
from vllm_fl_flaggems.ops.layout import refusal, row_layout
from vllm_fl_flaggems.tiles import activation_tile

_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


def supports_silu(x: Tensor) -> object:
    """Say whether ``silu_and_mul`` takes ``x``."""
    reason = refusal(x)
    if reason:
        return reason
    if x.shape[-1] == 0 or x.shape[-1] % 2:
        return f"the last dimension ({x.shape[-1]}) does not split into two halves"
    return True


def supports_gelu(x: Tensor, approximate: str = "none") -> object:
    """Say whether ``gelu_and_mul`` takes these arguments."""
    if approximate not in _GELUS:
        return f"approximate={approximate!r} is neither 'none' nor 'tanh'"
    return supports_silu(x)


def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]``.

    SiLU is rounded to the dtype of ``x``, then the product is (vLLM ``SiluAndMul``).

    Args:
        x: ``[..., 2 * d]``, fp16, bf16 or fp32, the last dimension contiguous; not modified.

    Returns:
        A new tensor ``[..., d]``.
    """
    if is_compiling():
        return formulas.silu_and_mul(x)
    return _gated(x, "silu")


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]``.

    GELU is rounded to the dtype of ``x``, then the product is (vLLM ``GeluAndMul``).

    Args:
        x: ``[..., 2 * d]``, fp16, bf16 or fp32, the last dimension contiguous; not modified.
        approximate: ``"none"`` for the error function, ``"tanh"`` for its tanh approximation.

    Returns:
        A new tensor ``[..., d]``.
    """
    if is_compiling():
        return formulas.gelu_and_mul(x, approximate)
    return _gated(x, _GELUS[approximate])


def _gated(x: Tensor, activation: str) -> Tensor:
    *leading, width = x.shape
    d = width // 2
    out = x.new_empty((*leading, d))
    elements = out.numel()
    if elements:
        layout = row_layout(x)
        gated_activation(out, x, layout, activation, activation_tile(elements // d, d))
    return out
