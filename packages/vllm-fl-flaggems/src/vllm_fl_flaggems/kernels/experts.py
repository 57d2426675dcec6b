"""The two products of a mixture of experts, each over blocks of rows that share an expert.

The first one multiplies by gate and up rows that alternate in one tile, so that both halves of an
output end in the same thread and the activation is applied before anything is stored. The second
one multiplies by the router's weight in fp32 and stores each row where its choice is; programs of
its own store zeros where a choice has no expert.
"""

# ruff: noqa: ANN001, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fl_flaggems.kernels.activation import gelu, silu
from vllm_fl_flaggems.kernels.align import Choices, expert_of
from vllm_fl_flaggems.kernels.launch import launch_options, wait_for_inputs
from vllm_fl_flaggems.moe_tiles import MatmulTile

_CLEARED = 64  # choices that a program looks through for those without an expert
_CLEARED_WIDTH = tl.constexpr(32)  # elements of their rows that it writes at a time


@triton.jit
def _block_and_tile(program, blocks, TILES: tl.constexpr, GROUP: tl.constexpr):
    """Return which block of rows and which tile of columns: GROUP blocks share a pass of tiles."""
    group = program // (GROUP * TILES)
    height = tl.minimum(blocks - group * GROUP, GROUP)
    inner = program % (GROUP * TILES)
    return group * GROUP + inner % height, inner // height


@triton.jit
def _rows_of(
    sorted_ids,
    expert_ids,
    ids,
    expert_map,
    block,
    choices,
    RANGE: tl.constexpr,
    E: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Return the expert of a block, the choice of each of its rows, and which rows have one."""
    lane = tl.arange(0, BLOCK_M)
    if DIRECT:  # a block is one choice
        expert = expert_of(ids, expert_map, block, block < choices, RANGE, E, MAPPED)
        position = lane * 0 + block
        valid = lane == 0
    else:
        expert = tl.load(expert_ids + block)
        position = tl.load(sorted_ids + block * BLOCK_M + lane)
        valid = position < choices
        position = tl.where(valid, position, 0)  # so that loads of the others need no mask
    return expert, position, valid


@triton.jit
def _product(
    a_rows,
    b_rows,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return ``a @ b.T`` in fp32, of rows given by pointers to their first elements.

    With SWAP the rows of b are those of the instruction: it takes 64 of them but few of a.
    """
    depth = tl.arange(0, BLOCK_K)
    a_source = a_rows[:, None] + depth[None, :]
    b_source = b_rows[:, None] + depth[None, :]
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            a = tl.load(a_source)
            b = tl.load(b_source)
        else:
            inside = (depth < DEPTH - first)[None, :]
            a = tl.load(a_source, mask=inside, other=0.0)
            b = tl.load(b_source, mask=inside, other=0.0)
        if SWAP:
            total = tl.dot(b, tl.trans(a), total, input_precision=PRECISION)
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
        a_source += BLOCK_K
        b_source += BLOCK_K
    if SWAP:
        total = tl.trans(total)
    return total


@triton.jit(do_not_specialize=["choices"])
def _up_kernel(
    out,
    x,
    w,
    weights,
    sorted_ids,
    expert_ids,
    post_pad,
    ids,
    expert_map,
    choices,
    x_stride,
    w_expert_stride,
    w_row_stride,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    K: tl.constexpr,
    RANGE: tl.constexpr,
    E: tl.constexpr,
    MAPPED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    half: tl.constexpr = BLOCK_N // 2
    tiles: tl.constexpr = (INNER + half - 1) // half
    if DIRECT:
        blocks = choices
    else:
        blocks = tl.load(post_pad) // BLOCK_M
    program = tl.program_id(0)
    if program < blocks * tiles:
        block, tile = _block_and_tile(program, blocks, tiles, GROUP)
        expert, position, valid = _rows_of(
            sorted_ids, expert_ids, ids, expert_map, block, choices, RANGE, E, MAPPED, BLOCK_M,
            DIRECT,
        )  # fmt: skip
        if expert >= 0:
            column = tl.arange(0, BLOCK_N)
            feature = tile * half + column // 2
            feature = tl.where(feature < INNER, feature, 0) + column % 2 * INNER
            a_rows = x + (position // K).to(tl.int64) * x_stride
            b_rows = w + expert.to(tl.int64) * w_expert_stride
            b_rows += feature.to(tl.int64) * w_row_stride
            both = _product(a_rows, b_rows, DEPTH, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, PRECISION)
            gate, up = tl.split(tl.reshape(both, (BLOCK_M, half, 2)))
            if WEIGHTED:
                weight = tl.load(weights + position)[:, None]
                gate *= weight
                up *= weight
            if ACTIVATION == "silu":
                active = silu(gate)
            else:
                active = gelu(gate)
            if DIRECT:
                row = position.to(tl.int64)
            else:
                row = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            feature = tile * half + tl.arange(0, half)
            stored = valid[:, None] & (feature < INNER)[None, :]
            target = out + (row * INNER)[:, None] + feature[None, :]
            tl.store(target, (active * up).to(out.dtype.element_ty), mask=stored)


@triton.jit
def _clear(
    out,
    ids,
    expert_map,
    first,
    choices,
    WIDTH: tl.constexpr,
    RANGE: tl.constexpr,
    E: tl.constexpr,
    MAPPED: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """Write zeros to the rows of those of some choices that have no expert."""
    position = first + tl.arange(0, CLEARED)
    inside = position < choices
    nowhere = inside & (expert_of(ids, expert_map, position, inside, RANGE, E, MAPPED) < 0)
    if tl.max(nowhere.to(tl.int32), axis=0) > 0:  # seldom
        rows = out + (position.to(tl.int64) * WIDTH)[:, None]
        for start in range(0, WIDTH, _CLEARED_WIDTH):
            feature = start + tl.arange(0, _CLEARED_WIDTH)
            zero = tl.zeros((CLEARED, _CLEARED_WIDTH), out.dtype.element_ty)
            stored = nowhere[:, None] & (feature < WIDTH)[None, :]
            tl.store(rows + feature[None, :], zero, mask=stored)


@triton.jit(do_not_specialize=["choices", "most"])
def _down_kernel(
    out,
    x,
    w,
    weights,
    sorted_ids,
    expert_ids,
    post_pad,
    ids,
    expert_map,
    choices,
    most,
    w_expert_stride,
    w_row_stride,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    RANGE: tl.constexpr,
    E: tl.constexpr,
    MAPPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    CLEARED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    tiles: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    if DIRECT:
        blocks = choices
    else:
        blocks = tl.load(post_pad) // BLOCK_M
    program = tl.program_id(0)
    if program < blocks * tiles:
        block, tile = _block_and_tile(program, blocks, tiles, GROUP)
        expert, position, valid = _rows_of(
            sorted_ids, expert_ids, ids, expert_map, block, choices, RANGE, E, MAPPED, BLOCK_M,
            DIRECT,
        )  # fmt: skip
        if expert >= 0:
            feature = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            if DIRECT:
                row = position.to(tl.int64)
            else:
                row = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            b_rows = w + expert.to(tl.int64) * w_expert_stride
            b_rows += tl.where(feature < WIDTH, feature, 0).to(tl.int64) * w_row_stride
            a_rows = x + row * DEPTH
            result = _product(a_rows, b_rows, DEPTH, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, PRECISION)
            if WEIGHTED:
                result *= tl.load(weights + position)[:, None]
            stored = valid[:, None] & (feature < WIDTH)[None, :]
            target = out + (position.to(tl.int64) * WIDTH)[:, None] + feature[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=stored)
    elif program >= most * tiles:
        first = (program - most * tiles) * CLEARED
        _clear(out, ids, expert_map, first, choices, WIDTH, RANGE, E, MAPPED, CLEARED)


@dataclass(frozen=True)
class Blocks:
    """Blocks of choices that share an expert.

    Attributes:
        choices: the choices.
        rows: rows of a block.
        aligned: the results of the operator ``moe_align_block_size``; None when each choice is its
            own block.
    """

    choices: Choices
    rows: int
    aligned: tuple[Tensor, Tensor, Tensor] | None

    @property
    def most(self) -> int:
        """How many blocks there are at most."""
        return self.choices.ids.numel() if self.aligned is None else self.aligned[1].numel()

    def arguments(self) -> tuple[Tensor | int, ...]:
        """Return the kernels' arguments for where the rows are."""
        ids, mapping = self.choices.ids, self.choices.expert_map
        places = (ids, ids, ids) if self.aligned is None else self.aligned
        return (*places, ids, ids if mapping is None else mapping, ids.numel())

    def constants(self) -> dict[str, int | bool]:
        """Return the kernels' constants for where the rows are."""
        return {
            "RANGE": self.choices.range,
            "E": self.choices.experts,
            "MAPPED": self.choices.expert_map is not None,
            "DIRECT": self.aligned is None,
            "BLOCK_M": self.rows,
        }


def _cut(x: Tensor, tile: MatmulTile) -> dict[str, int | bool | str]:
    return {
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "GROUP": tile.group,
        "SWAP": tile.swap,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **launch_options(),
    }


def up_project(
    out: Tensor,
    x: Tensor,
    w1: Tensor,
    weights: Tensor,
    blocks: Blocks,
    activation: str,
    weighted: bool,
    tile: MatmulTile,
) -> None:
    """Write ``act(x @ gate.T) * (x @ up.T)`` of the experts of each block.

    Args:
        out: ``[rows, inner]``, contiguous; the row of a choice is its place in ``sorted_ids``, or
            its position when each choice is its own block. Other rows stay as they are.
        x: ``[tokens, hidden]``, the last dimension contiguous.
        w1: ``[experts, 2 * inner, hidden]``, gate rows first, the last dimension contiguous.
        weights: ``[tokens, k]`` fp32, contiguous.
        blocks: which rows belong together.
        activation: ``"silu"`` or ``"gelu"``.
        weighted: whether the weight multiplies the input.
        tile: how to cut the product.
    """
    inner = w1.shape[1] // 2
    programs = blocks.most * -(-inner // (tile.columns // 2))
    _up_kernel[(programs,)](
        out,
        x,
        w1,
        weights,
        *blocks.arguments(),
        x.stride(0),
        w1.stride(0),
        w1.stride(1),
        DEPTH=w1.shape[2],
        INNER=inner,
        K=weights.shape[1],
        ACTIVATION=activation,
        WEIGHTED=weighted,
        **blocks.constants(),
        **_cut(x, tile),
    )


def down_project(
    out: Tensor,
    x: Tensor,
    w2: Tensor,
    weights: Tensor,
    blocks: Blocks,
    weighted: bool,
    tile: MatmulTile,
) -> None:
    """Write ``x @ w2.T`` of the experts of each block.

    Args:
        out: ``[tokens * k, hidden]``, contiguous; overwritten, with zeros where a choice has no
            expert.
        x: the result of :func:`up_project`.
        w2: ``[experts, hidden, inner]``, the last dimension contiguous.
        weights: ``[tokens, k]`` fp32, contiguous.
        blocks: which rows belong together.
        weighted: whether the weight multiplies the result.
        tile: how to cut the product.
    """
    width, choices = w2.shape[1], len(out)
    programs = blocks.most * -(-width // tile.columns) + -(-choices // _CLEARED)
    _down_kernel[(programs,)](
        out,
        x,
        w2,
        weights,
        *blocks.arguments(),
        blocks.most,
        w2.stride(0),
        w2.stride(1),
        DEPTH=w2.shape[2],
        WIDTH=width,
        WEIGHTED=weighted,
        CLEARED=_CLEARED,
        **blocks.constants(),
        **_cut(x, tile),
    )
