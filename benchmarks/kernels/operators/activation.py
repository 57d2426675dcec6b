"""silu_and_mul."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.candidates import flag_gems, inductor, vllm
from benchmarks.kernels.operator import OURS, Inputs, Operator, Shape, Sweep, random
from vllm_fl_flaggems import tiles
from vllm_fl_flaggems.kernels import activation as activation_kernels
from vllm_fl_flaggems.ops import activation
from vllm_fl_flaggems.ops.layout import row_layout
from vllm_fl_reference.ops import activation as plain_activation


def silu_inputs(shape: Shape, device: str, seed: int) -> Inputs:
    """Return x."""
    return (random((shape[0], 2 * shape[1]), device, seed),)


def silu_oracle(x: Tensor) -> Tensor:
    """Return the result of silu_and_mul in float64."""
    gate, up = x.double().chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_vllm(x: Tensor) -> Tensor:
    """Call vLLM's CUDA kernel."""
    out = x.new_empty((x.shape[0], x.shape[1] // 2))
    torch.ops._C.silu_and_mul(out, x)
    return out


def silu_flag_gems(gems: Any, x: Tensor) -> Tensor:
    """Call flag_gems, which takes the halves."""
    return gems.silu_and_mul(*x.chunk(2, dim=-1))


def silu_launch(x: Tensor, tile: tiles.ActivationTile) -> Tensor:
    """Launch our kernel with a given tile."""
    out = x.new_empty((x.shape[0], x.shape[1] // 2))
    activation_kernels.gated_activation(out, x, row_layout(x), "silu", tile)
    return out


OPERATORS = {
    "silu_and_mul": Operator(
        shapes=[(1, 12288), (64, 12288), (256, 3072), (2048, 12288), (8192, 12288)],
        make=silu_inputs,
        oracle=silu_oracle,
        traffic=lambda shape: 2 * math.prod(shape) * 3,
        candidates={
            OURS: lambda: activation.silu_and_mul,
            "vllm": vllm(silu_vllm),
            "inductor": inductor(plain_activation.silu_and_mul),
            "flag_gems": flag_gems(silu_flag_gems),
        },
        sweep=Sweep(
            tile=lambda shape: tiles.activation_tile(*shape),
            rivals=lambda shape: tiles.activation_rivals(shape[1]),
            launch=silu_launch,
        ),
    )
}
