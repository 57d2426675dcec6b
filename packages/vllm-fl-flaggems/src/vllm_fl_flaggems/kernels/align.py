"""Sorting the choices by expert, each expert's part padded to whole blocks, without a host wait.

Two strategies. ``whole``: one kernel in which every program counts all choices and then places
those of a few experts; nothing passes between programs. It reads the choices once a program, so it
is for few of them. ``split``: one kernel counts pieces of the choices, the next one places each
piece behind the pieces before it; an expert's choices come in any order there.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from vllm_fl_flaggems.kernels.launch import launch_options, wait_for_inputs
from vllm_fl_flaggems.moe_tiles import AlignTile

_PIECES = tl.constexpr(8)  # pieces whose counts are added up at a time
_BLOCKS = tl.constexpr(32)  # blocks of an expert that are labelled at a time


@triton.jit
def expert_of(
    ids, expert_map, position, inside, RANGE: tl.constexpr, E: tl.constexpr, MAPPED: tl.constexpr
):
    """Return the int32 expert of each choice, through the map if there is one, or -1 for none.

    Args:
        ids: the choices.
        expert_map: ``[RANGE]``; not looked at unless ``MAPPED``.
        position: which choices.
        inside: mask of those that exist.
        RANGE: choices outside ``[0, RANGE)`` are none.
        E: nor are what the map gives outside ``[0, E)``.
        MAPPED: whether there is a map.
    """
    number = tl.load(ids + position, mask=inside, other=-1)
    known = (number >= 0) & (number < RANGE)
    if MAPPED:
        number = tl.load(expert_map + number, mask=known, other=-1)
        known = (number >= 0) & (number < E)
    return tl.where(known, number, -1).to(tl.int32)


@triton.jit
def _ends(counts, BLOCK: tl.constexpr):
    """Return the padded counts and where each expert's part ends."""
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    return padded, tl.cumsum(padded, axis=0)


@triton.jit
def _pick(values, bin, expert):
    """Return the values of some experts out of those of all."""
    return tl.sum(tl.where(bin[None, :] == expert[:, None], values[None, :], 0), axis=1)


@triton.jit
def _finish(
    sorted_ids,
    expert_ids,
    post_pad,
    labels,
    program,
    programs,
    expert,
    start,
    number,
    padded,
    total,
    choices,
    size,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    TAIL: tl.constexpr,
    LABELLED: tl.constexpr,
):
    """Write all but the choices: padding and blocks of some experts, a share of what is unused."""
    gap = tl.arange(0, PAD)[None, :] + number[:, None]
    tl.store(sorted_ids + start[:, None] + gap, choices, mask=gap < padded[:, None])
    label = expert
    if LABELLED:
        label = tl.load(labels + expert, mask=expert < E, other=-1)
    for first in range(0, tl.max(padded, axis=0) // BLOCK, _BLOCKS):
        block = first + tl.arange(0, _BLOCKS)[None, :]
        target = expert_ids + start[:, None] // BLOCK + block
        tl.store(target, label[:, None] + block * 0, mask=block < padded[:, None] // BLOCK)
    lane = tl.arange(0, TAIL)
    for first in range(total + program * TAIL, size, programs * TAIL):
        tl.store(sorted_ids + first + lane, choices, mask=first + lane < size)
    blocks = (size + BLOCK - 1) // BLOCK
    for first in range(total // BLOCK + program * TAIL, blocks, programs * TAIL):
        tl.store(expert_ids + first + lane, -1, mask=first + lane < blocks)
    tl.store(post_pad, total, mask=program == 0)


@triton.jit(do_not_specialize=["choices", "size"])
def _whole_kernel(
    sorted_ids,
    expert_ids,
    post_pad,
    ids,
    expert_map,
    choices,
    size,
    RANGE: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    MAPPED: tl.constexpr,
    LABELLED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    bin = tl.arange(0, BINS)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, choices, CHUNK):
        position = first + lane
        owner = expert_of(ids, expert_map, position, position < choices, RANGE, E, MAPPED)
        counts += tl.histogram(tl.where(owner < 0, 0, owner), BINS, mask=owner >= 0)
    padded, ends = _ends(counts, BLOCK)
    total = tl.max(ends, axis=0)
    program = tl.program_id(0)
    expert = program * EXPERTS + tl.arange(0, EXPERTS)
    start = _pick(ends - padded, bin, expert)
    place = start
    for first in range(0, choices, CHUNK):
        position = first + lane
        owner = expert_of(ids, expert_map, position, position < choices, RANGE, E, MAPPED)
        mine = (owner[None, :] == expert[:, None]).to(tl.int32)
        target = sorted_ids + place[:, None] + tl.cumsum(mine, axis=1) - 1
        tl.store(target, position[None, :] + expert[:, None] * 0, mask=mine == 1)
        place += tl.sum(mine, axis=1)
    _finish(
        sorted_ids,
        expert_ids,
        post_pad,
        expert_map,
        program,
        tl.num_programs(0),
        expert,
        start,
        place - start,
        _pick(padded, bin, expert),
        total,
        choices,
        size,
        E,
        BLOCK,
        PAD,
        CHUNK,
        LABELLED,
    )


@triton.jit(do_not_specialize=["choices"])
def _count_kernel(
    counts,
    ids,
    expert_map,
    choices,
    RANGE: tl.constexpr,
    E: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    piece = tl.program_id(0)
    position = piece * CHUNK + tl.arange(0, CHUNK)
    owner = expert_of(ids, expert_map, position, position < choices, RANGE, E, MAPPED)
    found = tl.histogram(tl.where(owner < 0, 0, owner), BINS, mask=owner >= 0)
    tl.store(counts + piece * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["choices", "size", "pieces"])
def _place_kernel(
    sorted_ids,
    expert_ids,
    post_pad,
    counts,
    cursors,
    ids,
    expert_map,
    choices,
    size,
    pieces,
    RANGE: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    MAPPED: tl.constexpr,
    LABELLED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    program = tl.program_id(0)
    bin = tl.arange(0, BINS)
    all_counts = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for first in range(0, pieces, _PIECES):
        piece = first + tl.arange(0, _PIECES)
        source = counts + piece[:, None] * BINS + bin[None, :]
        some = tl.load(source, mask=(piece < pieces)[:, None], other=0)
        all_counts += tl.sum(some, axis=0)
        before += tl.sum(tl.where((piece < program)[:, None], some, 0), axis=0)
    padded, ends = _ends(all_counts, BLOCK)
    if program < pieces:
        # Each piece has its own cursors, so that this program alone advances them.
        cursor = cursors + program * BINS
        tl.store(cursor + bin, ends - padded + before)
        tl.debug_barrier()
        position = program * CHUNK + tl.arange(0, CHUNK)
        owner = expert_of(ids, expert_map, position, position < choices, RANGE, E, MAPPED)
        place = tl.atomic_add(cursor + owner, 1, mask=owner >= 0, sem="relaxed")
        tl.store(sorted_ids + place, position, mask=owner >= 0)
    else:
        expert = (program - pieces) * EXPERTS + tl.arange(0, EXPERTS)
        _finish(
            sorted_ids,
            expert_ids,
            post_pad,
            expert_map,
            program - pieces,
            tl.num_programs(0) - pieces,
            expert,
            _pick(ends - padded, bin, expert),
            _pick(all_counts, bin, expert),
            _pick(padded, bin, expert),
            tl.max(ends, axis=0),
            choices,
            size,
            E,
            BLOCK,
            PAD,
            CHUNK,
            LABELLED,
        )


@dataclass(frozen=True)
class Choices:
    """What is sorted.

    Attributes:
        ids: int32 or int64, contiguous, any shape with at least one element.
        range: ids outside ``[0, range)`` are left out.
        experts: how many parts there are.
        expert_map: ``[range]`` int32, or None.
        local: whether the parts are those of the map's results, with what it sends elsewhere left
            out; otherwise the map only labels the blocks.
    """

    ids: Tensor
    range: int
    experts: int
    expert_map: Tensor | None = None
    local: bool = False


def align(
    sorted_ids: Tensor,
    expert_ids: Tensor,
    post_pad: Tensor,
    choices: Choices,
    block: int,
    tile: AlignTile,
) -> None:
    """Write positions by expert, the expert of each block, and how many entries are used.

    Args:
        sorted_ids: ``[size]`` int32, overwritten: positions in ``choices.ids`` flattened, and the
            number of choices everywhere else.
        expert_ids: ``[ceil(size / block)]`` int32, overwritten; -1 after the last block.
        post_pad: ``[1]`` int32, overwritten.
        choices: what is sorted.
        block: entries of a block.
        tile: how to cut the work.
    """
    count = choices.ids.numel()
    mapped = choices.expert_map is not None
    sizes = {"RANGE": choices.range, "E": choices.experts, "BINS": tile.bins, "CHUNK": tile.chunk}
    given = (choices.ids, choices.expert_map if mapped else choices.ids, count)
    outputs = (sorted_ids, expert_ids, post_pad)
    options = {"num_warps": tile.warps, **launch_options()}
    mapping = {"MAPPED": mapped and choices.local}
    cut = {
        "BLOCK": block,
        "PAD": tile.pad,
        "EXPERTS": tile.experts,
        "LABELLED": mapped and not choices.local,
    }
    programs = -(-choices.experts // tile.experts)
    size = sorted_ids.numel()
    if tile.strategy == "whole":
        _whole_kernel[(programs,)](*outputs, *given, size, **sizes, **mapping, **cut, **options)
        return
    pieces = -(-count // tile.chunk)
    scratch = sorted_ids.new_empty((2, pieces, tile.bins))
    _count_kernel[(pieces,)](scratch[0], *given, **sizes, **mapping, **options)
    _place_kernel[(pieces + programs,)](
        *outputs, scratch[0], scratch[1], *given, size, pieces, **sizes, **mapping, **cut, **options
    )
