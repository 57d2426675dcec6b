"""Step 2: the implementations."""

from __future__ import annotations

import torch


def rms_norm_bolt(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise x, or x + residual, over the last dimension."""
    if weight.shape != x.shape[-1:] or (residual is not None and residual.shape != x.shape):
        raise ValueError("weight or residual does not fit x")
    total = x.float() if residual is None else x.float() + residual.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    out = (normed.to(weight.dtype) * weight).to(x.dtype)
    return out if residual is None else (out, total.to(residual.dtype))
