"""How the work of each kernel is cut into programs: the choice for a call, and its rivals.

Each choice is a pure function of shapes, written down once; nothing is tuned at run time, so that
the first call is as good as any and a captured graph never holds a trial.
``python -m benchmarks.kernels --sweep`` times the choice beside its rivals on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

MAX_ROW = 32768
"""The longest row that a program holds in registers: 32 fp32 values in each of 1024 threads."""

_WARP = 32
_VECTOR = 8  # 16-bit elements in the 16 bytes that a thread moves at once
_BUSY = 132  # programs that occupy every multiprocessor of an H200 once
_ENOUGH = 2048  # elements that keep a program's threads busy


@dataclass(frozen=True)
class ActivationTile:
    """A piece of one row of the output.

    Attributes:
        block: its elements.
        warps: warps of a program.
        eviction: what the cache does with the input; "" is its normal policy.
    """

    block: int
    warps: int
    eviction: str = ""


@dataclass(frozen=True)
class NormTile:
    """Whole rows.

    Attributes:
        rows: rows of a program.
        block: elements of a row, rounded up to a power of two.
        warps: warps of a program.
        eviction: what the cache does with the input; "" is its normal policy.
    """

    rows: int
    block: int
    warps: int
    eviction: str = ""


@dataclass(frozen=True)
class RotaryTile:
    """Heads, of query and key.

    Attributes:
        heads: heads of a program.
        warps: warps of a program.
    """

    heads: int
    warps: int


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def _activation_tile(few: bool, d: int) -> ActivationTile:
    block = min(256 if few else 2048, power_of_2(d))
    return ActivationTile(block, max(1, block // (_WARP * _VECTOR)))


def activation_tile(rows: int, d: int) -> ActivationTile:
    """Choose the tile for ``rows`` output rows of ``d`` elements."""
    return _activation_tile(rows * d < _BUSY * 1024, d)


@functools.cache
def norm_tile(n: int) -> NormTile:
    """Choose the tile for rows of ``n`` elements.

    The number of rows has no say: the warps decide how a row is spread over threads, hence in
    which order it is summed. Rows per program do not, as long as every thread has a vector or more.
    """
    block = power_of_2(n)
    rows = max(1, _ENOUGH // block)
    # Four vectors a thread for the shorter rows, two for the longer ones: measured on an H200.
    warps = 4 if block <= 4096 else 16 if block <= 16384 else 32
    return NormTile(rows, block, warps)


@functools.cache
def _heads_of_a_warp(half: int) -> int:
    return max(1, _WARP * _VECTOR // power_of_2(half))


def rotary_tile(heads: int, half: int) -> RotaryTile:
    """Choose the tile for ``heads`` heads (of all tokens) with ``half`` rotated pairs each."""
    of_a_warp = _heads_of_a_warp(half)
    return RotaryTile((4 if heads >= 4 * _BUSY * of_a_warp else 2) * of_a_warp, 4)


def activation_rivals(d: int) -> Iterator[ActivationTile]:
    """Yield every tile worth timing for output rows of ``d`` elements."""
    for block in (256, 512, 1024, 2048, 4096):
        for warps in (1, 2, 4, 8):
            if block <= power_of_2(d) and _VECTOR <= block // (_WARP * warps) <= 4 * _VECTOR:
                yield ActivationTile(block, warps)
                yield ActivationTile(block, warps, "evict_first")


def norm_rivals(n: int) -> Iterator[NormTile]:
    """Yield every tile worth timing for rows of ``n`` elements."""
    block = power_of_2(n)
    for rows in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8, 16, 32):
            if _VECTOR <= rows * block // (_WARP * warps) <= 4 * _VECTOR:
                yield NormTile(rows, block, warps)
                yield NormTile(rows, block, warps, "evict_first")


def rotary_rivals(half: int) -> Iterator[RotaryTile]:
    """Yield every tile worth timing for heads with ``half`` rotated pairs."""
    block = power_of_2(half)
    for heads in (1, 2, 4, 8, 16, 32, 64):
        for warps in (1, 2, 4, 8):
            if _VECTOR // 2 <= heads * block // (_WARP * warps) <= 4 * _VECTOR:
                yield RotaryTile(heads, warps)
