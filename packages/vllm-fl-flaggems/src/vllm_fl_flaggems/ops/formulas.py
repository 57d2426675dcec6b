"""What torch.compile sees of the operators that Inductor fuses with their neighbours.

Inductor writes Triton kernels, too. A small kernel of ours is opaque to it: a norm, a rotation and
what stands between them become three launches with their tensors in memory, where the formulas
become one. So traced code gets the formula and the kernels run in eager mode; both round at the
same places. Nothing here checks arguments: the operators' predicates have.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]``."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]``."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate=approximate) * up


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, gemma: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the normalised, scaled rows, with a residual also the rounded sum."""
    total = x.float() if residual is None else x.float() + residual.float()
    normed = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + epsilon)
    scaled = normed * (1.0 + weight.float()) if gemma else normed.to(weight.dtype) * weight
    out = scaled.to(x.dtype)
    return out if residual is None else (out, total.to(residual.dtype))


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    is_neox_style: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return query and key rotated."""
    cos = cos.index_select(0, position_ids).to(query.dtype).unsqueeze(1)
    sin = sin.index_select(0, position_ids).to(query.dtype).unsqueeze(1)
    rotated = _rotated(query, cos, sin, is_neox_style)
    return rotated, None if key is None else _rotated(key, cos, sin, is_neox_style)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    half = cos.shape[-1]
    turned, tail = x[..., : 2 * half], x[..., 2 * half :]
    if is_neox_style:
        first, second = turned.chunk(2, dim=-1)
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.cat(pair, dim=-1) if is_neox_style else torch.stack(pair, dim=-1).flatten(-2)
    return torch.cat((turned, tail), dim=-1) if tail.shape[-1] else turned
