"""How the work of the mixture-of-experts kernels is cut: the choice for a call, and its rivals.

As in :mod:`vllm_fl_flaggems.tiles`, each choice is a pure function of shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from vllm_fl_flaggems.tiles import power_of_2

MAX_EXPERTS = 4096
"""The most experts: a row of their scores is held in registers."""

MAX_BLOCK = 4096
"""The longest block of ``moe_align_block_size``."""

_WARP = 32
_BUSY = 132  # programs that occupy every multiprocessor of an H200 once
_MIN = 16  # rows, columns and depth of the smallest product that the compiler takes


@dataclass(frozen=True)
class TopkTile:
    """Whole rows of logits.

    Attributes:
        rows: rows of a program.
        block: experts, rounded up to a power of two.
        slots: chosen experts, rounded up to a power of two.
        warps: warps of a program.
    """

    rows: int
    block: int
    slots: int
    warps: int


@dataclass(frozen=True)
class GroupedTile:
    """The experts of a token as a matrix.

    Attributes:
        tokens: tokens of a program.
        groups: groups, rounded up to a power of two.
        members: experts of a group, rounded up to a power of two.
        slots: chosen experts, rounded up to a power of two.
        warps: warps of a program.
    """

    tokens: int
    groups: int
    members: int
    slots: int
    warps: int


@dataclass(frozen=True)
class AlignTile:
    """How choices are sorted.

    Attributes:
        strategy: "whole" or "split", see :mod:`vllm_fl_flaggems.kernels.align`.
        experts: experts that a program finishes, a power of two.
        chunk: choices that a program looks at together, a power of two.
        warps: warps of a program.
        bins: experts, rounded up to a power of two.
        pad: the most padding of an expert and one more, rounded up to a power of two.
    """

    strategy: str
    experts: int
    chunk: int
    warps: int
    bins: int
    pad: int


@dataclass(frozen=True)
class SumTile:
    """A piece of one row of the output.

    Attributes:
        block: its elements.
        warps: warps of a program.
    """

    block: int
    warps: int


@dataclass(frozen=True)
class MatmulTile:
    """A product over a block of rows.

    Attributes:
        columns: columns of the weight's tile; of the first product half of them are gates.
        depth: elements of the sum in a step.
        warps: warps of a program.
        stages: steps that are loaded ahead, and one.
        group: blocks of rows that go through the columns together.
        swap: whether the weight has the rows of the instruction.
    """

    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 1
    swap: bool = False


@dataclass(frozen=True)
class ExpertsTile:
    """How ``fused_experts`` is computed.

    Attributes:
        direct: whether each choice is a block of its own, so that nothing is sorted.
        rows: rows of a block.
        up: the first product.
        down: the second product.
    """

    direct: bool
    rows: int
    up: MatmulTile
    down: MatmulTile


# -- routing --------------------------------------------------------------------------------------


@functools.cache
def _topk_tile(few: bool, experts: int, k: int) -> TopkTile:
    block = max(_WARP, power_of_2(experts))
    # A row in one warp is reduced by one instruction, up to 16 values a thread.
    of_a_row = max(1, block // (_WARP * 16))
    rows = 1 if few or of_a_row > 1 else 4
    return TopkTile(rows, block, power_of_2(k), of_a_row * rows)


def topk_tile(tokens: int, experts: int, k: int) -> TopkTile:
    """Choose the tile for the k best of ``experts`` experts."""
    return _topk_tile(tokens <= 8 * _BUSY, experts, k)


def topk_rivals(experts: int, k: int) -> Iterator[TopkTile]:
    """Yield every tile worth timing for ``experts`` experts."""
    block = max(_WARP, power_of_2(experts))
    for rows, warps in product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        if 1 <= rows * block // (_WARP * warps) <= 32 and warps <= max(rows, block // (2 * _WARP)):
            yield TopkTile(rows, block, power_of_2(k), warps)


@functools.cache
def _grouped_tile(few: bool, experts: int, groups: int, k: int) -> GroupedTile:
    rows, columns = power_of_2(groups), power_of_2(experts // groups)
    if rows <= 16:  # a group that fills a warp is reduced by one instruction
        columns = max(_WARP, columns)
    warps = min(8, max(1, rows * columns // (_WARP * 16)))
    return GroupedTile(1 if few or warps > 1 else 4, rows, columns, power_of_2(k), warps)


def grouped_tile(experts: int, groups: int, k: int, tokens: int) -> GroupedTile:
    """Choose the tile for the k best of ``experts`` experts in ``groups`` groups."""
    return _grouped_tile(tokens <= 8 * _BUSY, experts, groups, k)


def grouped_rivals(experts: int, groups: int, k: int) -> Iterator[GroupedTile]:
    """Yield every tile worth timing for ``experts`` experts in ``groups`` groups."""
    chosen = grouped_tile(experts, groups, k, 1)
    for tokens, warps in product((1, 2, 4), (1, 2, 4, 8)):
        yield replace(chosen, tokens=tokens, warps=warps)


def _split_warps(experts: int) -> int:
    # Measured on an H200: counting into few bins is a warp's work, into many that of four.
    return 1 if experts <= 256 else 4


@functools.cache
def _align_tile(split: bool, chunk: int, experts: int, block: int) -> AlignTile:
    own = power_of_2(-(-experts // _BUSY))
    warps = _split_warps(experts) if split else max(1, min(8, chunk // 128))
    bins, pad = max(_WARP, power_of_2(experts)), power_of_2(block)
    return AlignTile("split" if split else "whole", own, chunk, warps, bins, pad)


def align_tile(choices: int, experts: int, block: int) -> AlignTile:
    """Choose how ``choices`` choices of ``experts`` experts are sorted into blocks."""
    # Counting takes longer the more experts there are, and "whole" counts all in every program.
    split = choices * power_of_2(experts) > 1 << 20
    pieces = 64 if split else 1
    chunk = min(1024, max(_WARP, power_of_2(-(-choices // pieces))))
    return _align_tile(split, max(chunk, 256) if split else chunk, experts, block)


def align_rivals(choices: int, experts: int, block: int) -> Iterator[AlignTile]:
    """Yield every way worth timing to sort ``choices`` choices."""
    chosen = align_tile(choices, experts, block)
    seen = set()
    for strategy, own, chunk, warps in product(
        ("whole", "split"), (1, 4), (32, 256, 512, 1024, 4096), (1, 4, 8, 16)
    ):
        fits = 1 <= chunk // (_WARP * warps) <= 16 and chunk < 2 * max(_WARP, choices)
        many = -(-choices // chunk) > (32 if strategy == "whole" else 256)
        if fits and not many and own * chunk <= 8192:
            seen.add(replace(chosen, strategy=strategy, experts=own, chunk=chunk, warps=warps))
    yield from sorted(seen | {chosen}, key=repr)


@functools.cache
def _sum_tile(few: bool, width: int) -> SumTile:
    block = min(256 if few else 1024, power_of_2(width))
    return SumTile(block, max(1, block // (_WARP * 8)))


def sum_tile(tokens: int, width: int) -> SumTile:
    """Choose the tile for sums of ``width`` elements for each token."""
    return _sum_tile(tokens * width < _BUSY * 1024, width)


def sum_rivals(width: int) -> Iterator[SumTile]:
    """Yield every tile worth timing for sums of ``width`` elements."""
    for block, warps in product((128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8)):
        if block <= power_of_2(width) and 2 <= block // (_WARP * warps) <= 16:
            yield SumTile(block, warps)


# -- experts --------------------------------------------------------------------------------------


def _shared_bytes(rows: int, tile: MatmulTile, itemsize: int) -> int:
    return (rows + tile.columns) * tile.depth * itemsize * tile.stages


def fitted(rows: int, tile: MatmulTile, itemsize: int, memory: int) -> MatmulTile:
    """Return the tile, or with fewer stages, less depth or fewer columns what fits the memory.

    Args:
        rows: rows of a block.
        tile: the tile.
        itemsize: bytes of an element.
        memory: bytes of shared memory that a program can have.
    """
    while _shared_bytes(rows, tile, itemsize) > memory:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.depth > 2 * _MIN:
            tile = replace(tile, depth=tile.depth // 2)
        elif tile.columns > 2 * _MIN:
            tile = replace(tile, columns=tile.columns // 2)
        else:
            return replace(tile, stages=1)
    return tile


def _narrowed(tile: MatmulTile, columns: int, depth: int) -> MatmulTile:
    """Return the tile, no larger than a product of that many columns and that depth."""
    return replace(
        tile,
        columns=min(tile.columns, max(2 * _MIN, power_of_2(columns))),
        depth=min(tile.depth, max(_MIN, power_of_2(depth))),
    )


def _group(each: int) -> int:
    """Return how many blocks share a pass: those of an expert, which read the same weights.

    A power of two, not above: each number is another variant to compile.
    """
    return 1 << max(1, min(16, each)).bit_length() - 1


def _spread(tile: MatmulTile, choices: int, columns: int) -> MatmulTile:
    """Return the tile for choices that are not sorted, narrower where too few programs would run.

    A program has a part of the memory's bandwidth: those on half the multiprocessors do not use it
    up, however much each of them loads ahead.
    """
    if 2 * choices * -(-columns // tile.columns) > _BUSY:
        return tile
    return replace(tile, columns=64, depth=256, stages=4)


@functools.cache
def experts_tile(
    tokens: int, k: int, experts: int, hidden: int, inner: int, itemsize: int, memory: int
) -> ExpertsTile:
    """Choose how ``fused_experts`` is computed.

    Args:
        tokens: how many.
        k: choices of a token.
        experts: how many this rank has.
        hidden: size of the hidden state.
        inner: size between the two products.
        itemsize: bytes of an element.
        memory: bytes of shared memory that a program can have.
    """
    each = tokens * k / experts
    direct = tokens == 1 or tokens * k * 4 <= experts
    if each < 12:  # bound by the weights' bandwidth: they are the rows of the instruction
        rows = 16
        up = down = MatmulTile(128, 128, 4, 3, swap=True)
        if direct:
            up = _spread(up, tokens * k, 2 * inner)
            down = _spread(down, tokens * k, hidden)
    elif each < 32:
        rows = 32
        up = down = MatmulTile(128, 128, 4, 3)
    elif each < 64:
        rows = 64
        up = down = MatmulTile(128, 64, 4, 4)
    elif each < 128:
        rows = 64
        up = down = MatmulTile(256, 64, 8, 4)
    else:
        rows = 128
        up = down = MatmulTile(256, 64, 8, 4, _group(int(each) // 128))
    return ExpertsTile(
        direct=direct,
        rows=rows,
        up=fitted(rows, _narrowed(up, 2 * inner, hidden), itemsize, memory),
        down=fitted(rows, _narrowed(down, hidden, inner), itemsize, memory),
    )


DIRECT_RIVALS = (
    MatmulTile(64, 256, 4, 4, swap=True),
    MatmulTile(64, 128, 4, 6, swap=True),
    MatmulTile(128, 128, 4, 5, swap=True),  # vLLM's for a token of Mixtral on an H200
)
"""Tiles of either product worth timing where choices are not sorted."""


def experts_rivals(chosen: ExpertsTile, itemsize: int, memory: int) -> Iterator[ExpertsTile]:
    """Yield tiles worth timing beside the chosen one: other rows, and one product at a time."""
    yield chosen
    if chosen.direct:
        for tile in DIRECT_RIVALS:
            if _shared_bytes(chosen.rows, tile, itemsize) <= memory:
                yield replace(chosen, up=tile)
                yield replace(chosen, down=tile)
        return
    for rows in (16, 32, 64, 128):
        if rows in (chosen.rows // 2, 2 * chosen.rows):
            yield replace(chosen, rows=rows)
    few = chosen.rows <= 64
    for name in ("up", "down"):
        current = getattr(chosen, name)
        for columns, depth, warps, stages, swap in product(
            (32, 64, 128) if few else (128, 256),
            (64, 128, 256) if few else (64,),
            (4,) if few else (4, 8),
            (2, 3, 4) if few else (3, 4),
            (False, True) if few else (False,),
        ):
            tile = replace(
                current, columns=columns, depth=depth, warps=warps, stages=stages, swap=swap
            )
            values = chosen.rows * columns // (_WARP * warps)  # fp32 registers of a thread
            fits = memory // 8 <= _shared_bytes(chosen.rows, tile, itemsize) <= memory
            if fits and 2 <= values <= 128 and not (swap and columns < 64) and tile != current:
                yield replace(chosen, **{name: tile})
        for group in (1, 2, 4, 8, 16):
            if group != current.group and not few:
                yield replace(chosen, **{name: replace(current, group=group)})
