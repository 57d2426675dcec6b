"""rotary_embedding."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.candidates import flag_gems, inductor, vllm
from benchmarks.kernels.operator import OURS, Inputs, Operator, Shape, Sweep, random
from vllm_fl_flaggems import tiles
from vllm_fl_flaggems.kernels import rotary as rotary_kernels
from vllm_fl_flaggems.ops import rotary
from vllm_fl_reference.ops import rotary as plain_rotary

HEAD = 128
MAX_POSITION = 40960


@functools.cache
def rotary_table(device: str) -> Tensor:
    """Return cos and sin side by side, one table for all calls as in a model."""
    frequencies = torch.logspace(0, -6, HEAD // 2, base=10, device=device)
    angles = torch.arange(MAX_POSITION, device=device)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16()


def rotary_inputs(shape: Shape, device: str, seed: int) -> Inputs:
    """Return query and key as slices of a packed projection, cos, sin, positions, style."""
    tokens, heads, key_heads = shape
    packed = random((tokens, (heads + 2 * key_heads) * HEAD), device, seed)
    query, key, _ = packed.split([heads * HEAD, key_heads * HEAD, key_heads * HEAD], dim=-1)
    cos, sin = rotary_table(device).chunk(2, dim=-1)
    generator = torch.Generator(device).manual_seed(seed)
    positions = torch.randint(0, MAX_POSITION, (tokens,), generator=generator, device=device)
    return (
        query.view(tokens, heads, HEAD),
        key.view(tokens, key_heads, HEAD),
        cos,
        sin,
        positions,
        True,
    )


def rotary_oracle(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, neox: bool
) -> tuple[Tensor, Tensor]:
    """Return the rotated heads in float64."""
    wide = (query.double(), key.double(), cos.double(), sin.double())
    return plain_rotary.rotary_embedding(*wide, positions, neox)


def rotary_vllm(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, neox: bool
) -> tuple[Tensor, Tensor]:
    """Call vLLM's CUDA kernel; cos and sin are the halves of the table that it takes."""
    table = cos.as_strided((cos.shape[0], 2 * cos.shape[1]), (cos.stride(0), 1))
    torch.ops._C.rotary_embedding(
        positions, query.flatten(1), key.flatten(1), query.shape[2], table, neox
    )
    return query, key


def rotary_flag_gems(
    gems: Any,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    neox: bool,
) -> tuple[Tensor, Tensor]:
    """Call flag_gems."""
    return gems.apply_rotary_pos_emb(query, key, cos, sin, positions, not neox, True)


def rotary_launch(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    neox: bool,
    tile: tiles.RotaryTile,
) -> tuple[Tensor, Tensor]:
    """Launch our kernel with a given tile."""
    rotary_kernels.rotate_heads(None, query, key, cos, sin, positions, neox, tile)
    return query, key


OPERATORS = {
    "rotary_embedding": Operator(
        shapes=[(1, 32, 8), (64, 32, 8), (2048, 32, 8), (8192, 32, 8)],
        make=rotary_inputs,
        oracle=rotary_oracle,
        traffic=lambda shape: 2 * shape[0] * (shape[1] + shape[2]) * HEAD * 2,
        candidates={
            OURS: lambda: rotary.rotary_embedding,
            "vllm": vllm(rotary_vllm),
            "inductor": inductor(plain_rotary.rotary_embedding),
            "flag_gems": flag_gems(rotary_flag_gems),
        },
        sweep=Sweep(
            tile=lambda shape: tiles.rotary_tile(shape[0] * (shape[1] + shape[2]), HEAD // 2),
            rivals=lambda shape: tiles.rotary_rivals(HEAD // 2),
            launch=rotary_launch,
        ),
    )
}
