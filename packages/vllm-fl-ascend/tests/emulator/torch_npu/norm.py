"""Root-mean-square norms.

The order of rounding is that of CANN's kernels (``op_impl/ai_core/tbe/impl/ascendc/rms_norm`` of
CANN 8.1): statistics, the product with gamma, and for Gemma the sum 1 + gamma are fp32, and the
result is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.library import kernel, require, require_floats


def _rstd(input: Tensor) -> Tensor:
    return input.new_empty((*input.shape[:-1], 1), dtype=torch.float32)


def _check(operator: str, input: Tensor, gamma: Tensor, minimum: int) -> None:
    require_floats(operator, input, gamma)
    require(minimum <= input.dim() <= 8, f"{operator}: {input.dim()} dimensions")
    require(gamma.shape == input.shape[-1:], f"{operator}: gamma {gamma.shape} on {input.shape}")


def _normalise(input: Tensor, scale: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = input.float()
    rstd = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide * rstd * scale).to(input.dtype), rstd


@kernel(lambda input, gamma, epsilon=1e-6: (torch.empty_like(input), _rstd(input)))
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x / rms(x) * gamma, and 1 / rms. docs: 2 to 8 dimensions, gamma of the input's dtype."""
    _check("npu_rms_norm", input, gamma, 2)
    return _normalise(input, gamma.float(), epsilon)


@kernel(lambda x1, x2, gamma, epsilon=1e-6: (torch.empty_like(x1), _rstd(x1), torch.empty_like(x1)))
def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x = x1 + x2, 1 / rms, and x. aclnnAddRmsNorm: one dtype and shape; new tensors.

    The sum is rounded to the dtype before it is normalised.
    """
    _check("npu_add_rms_norm", x1, gamma, 1)
    require_floats("npu_add_rms_norm", x1, x2)
    require(x1.shape == x2.shape, f"npu_add_rms_norm: {x1.shape} and {x2.shape}")
    total = (x1.float() + x2.float()).to(x1.dtype)
    return (*_normalise(total, gamma.float(), epsilon), total)


@kernel(lambda input, gamma, epsilon=1e-6: (torch.empty_like(input), _rstd(input)))
def npu_gemma_rms_norm(
    input: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """x / rms(x) * (1 + gamma). docs: no empty and no non-contiguous tensors."""
    _check("npu_gemma_rms_norm", input, gamma, 1)
    require(input.numel() > 0, "npu_gemma_rms_norm: an empty tensor")
    for x in (input, gamma):
        require(x.is_contiguous(), "npu_gemma_rms_norm: a tensor is not contiguous")
    return _normalise(input, gamma.float() + 1, epsilon)
