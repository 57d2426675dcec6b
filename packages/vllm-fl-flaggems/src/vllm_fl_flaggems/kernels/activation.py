"""Gated activations: ``act(x[..., :d]) * x[..., d:]``, one program a tile of one row.

The activation is computed in fp32 and rounded to the input's dtype, then the product is: the order
of vLLM's own layers and kernels. Elements are independent, so the tile does not change a result.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_fl_flaggems.kernels.launch import launch_options, row_offset, wait_for_inputs
from vllm_fl_flaggems.tiles import ActivationTile


@triton.jit
def silu(x):
    """Return x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    """Return x times the normal distribution's cumulative function at x."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_tanh(x):
    # 0.5 * (1 + tanh(u)) is sigmoid(2u), which does not cancel for large negative u.
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def _gated_activation_kernel(
    out,
    x,
    inner,
    outer_stride,
    inner_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVICTION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    tiles: tl.constexpr = (D + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = program // tiles
    column = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    source = x + row_offset(row, inner, outer_stride, inner_stride) + column
    gate = tl.load(source, mask=inside, eviction_policy=EVICTION)
    up = tl.load(source + D, mask=inside, eviction_policy=EVICTION)
    wide = gate.to(tl.float32)
    if ACTIVATION == "silu":
        active = silu(wide)
    elif ACTIVATION == "gelu":
        active = gelu(wide)
    else:
        active = _gelu_tanh(wide)
    product = active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row.to(tl.int64) * D + column, product.to(out.dtype.element_ty), mask=inside)


def gated_activation(
    out: Tensor, x: Tensor, layout: tuple[int, int, int], activation: str, tile: ActivationTile
) -> None:
    """Write ``act(gate) * up`` to ``out``.

    Args:
        out: ``[rows, d]`` in any shape, contiguous, with at least one element; overwritten.
        x: ``[..., 2 * d]``, the last dimension contiguous, of ``out``'s dtype.
        layout: where the rows of ``x`` lie, see :func:`~vllm_fl_flaggems.ops.layout.row_layout`.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        tile: how to cut the rows.
    """
    d = out.shape[-1]
    programs = out.numel() // d * -(-d // tile.block)
    _gated_activation_kernel[(programs,)](
        out,
        x,
        *layout,
        D=d,
        BLOCK=tile.block,
        ACTIVATION=activation,
        EVICTION=tile.eviction,
        num_warps=tile.warps,
        **launch_options(),
    )
