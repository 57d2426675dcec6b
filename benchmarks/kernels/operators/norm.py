"""rms_norm, without and with a residual."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.candidates import flag_gems, inductor, vllm
from benchmarks.kernels.operator import OURS, Inputs, Operator, Shape, Sweep, random
from vllm_fl_flaggems import tiles
from vllm_fl_flaggems.kernels import norm as norm_kernels
from vllm_fl_flaggems.ops import norm
from vllm_fl_flaggems.ops.layout import row_layout
from vllm_fl_reference.ops import norm as plain_norm

EPSILON = 1e-6


def norm_inputs(residual: bool, shape: Shape, device: str, seed: int) -> Inputs:
    """Return x, residual, weight, epsilon."""
    added = random(shape, device, seed + 1000) if residual else None
    return random(shape, device, seed), added, 1 + 0.1 * random(shape[1:], device, 7), EPSILON


def norm_oracle(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> Any:
    """Return the result of rms_norm in float64."""
    total = x.double() if residual is None else x.double() + residual.double()
    out = total / (total.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()
    return out if residual is None else (out, total)


def norm_vllm(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> Any:
    """Call vLLM's CUDA kernel."""
    if residual is None:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out
    torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
    return x, residual


def norm_flag_gems(
    gems: Any, x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Any:
    """Call flag_gems."""
    if residual is None:
        return gems.rms_norm(x, [x.shape[-1]], weight, epsilon)
    return gems.fused_add_rms_norm(x, residual, [x.shape[-1]], weight, epsilon)


def norm_launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, tile: tiles.NormTile
) -> Any:
    """Launch our kernel with a given tile."""
    if residual is None:
        out = torch.empty_like(x)
        norm_kernels.rms_norm(out, x, weight, row_layout(x), epsilon, False, tile)
        return out
    layouts = (*row_layout(x), *row_layout(residual))
    norm_kernels.add_rms_norm(None, x, residual, weight, layouts, epsilon, False, tile)
    return x, residual


def rms_norm(residual: bool) -> Operator:
    """Return rms_norm with or without a residual."""
    return Operator(
        shapes=[(1, 4096), (64, 4096), (256, 2048), (2048, 4096), (8192, 4096), (8192, 8192)],
        make=partial(norm_inputs, residual),
        oracle=norm_oracle,
        traffic=lambda shape: 2 * math.prod(shape) * (4 if residual else 2),
        candidates={
            OURS: lambda: norm.rms_norm,
            "vllm": vllm(norm_vllm),
            "inductor": inductor(plain_norm.rms_norm),
            "flag_gems": flag_gems(norm_flag_gems),
        },
        sweep=Sweep(
            tile=lambda shape: tiles.norm_tile(shape[1]),
            rivals=lambda shape: tiles.norm_rivals(shape[1]),
            launch=norm_launch,
        ),
    )


OPERATORS = {
    "rms_norm": rms_norm(residual=False),
    "fused_add_rms_norm": rms_norm(residual=True),
}
