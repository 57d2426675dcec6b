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
_CACHED = 16 << 20  # bytes of keys and values that stay in the L2 cache of a large GPU
_SHARED = 227 * 1024  # bytes of shared memory that a program can have on an H200
_MOST_SPLITS = 64  # parts of a request; more cost more to join than they hide
_LEAST_KEYS = 128  # keys of a part, if the request is as long as it can be
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


@dataclass(frozen=True)
class CacheTile:
    """Heads of one token, key and value.

    Attributes:
        heads: heads of a program, a power of two.
        warps: warps of a program.
    """

    heads: int
    warps: int


@dataclass(frozen=True)
class AttentionTile:
    """Rows of queries, and the keys that they meet at a time.

    Attributes:
        block_m: rows, a row being one query head of one token.
        block_n: keys, a power of two.
        block_d: channels of a head, rounded up to a power of two.
        warps: warps of a program.
        stages: tiles of keys and values that are loaded ahead, with the one in use.
        registers: most that a thread may have, or None. With 128 two programs of eight warps run
            on a multiprocessor, and one multiplies while the other makes its weights.
    """

    block_m: int
    block_n: int
    block_d: int
    warps: int
    stages: int
    registers: int | None = None

    def tokens(self, group: int) -> int:
        """Return the query tokens of a program, of ``group`` heads to a key/value head."""
        return self.block_m // min(group, self.block_m)


@dataclass(frozen=True)
class DecodeTile(AttentionTile):
    """As above, for few query tokens.

    Attributes:
        splits: parts that the keys of a request are split into.
    """

    splits: int = 1


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


@functools.cache
def cache_tile(kv_heads: int, size: int) -> CacheTile:
    """Choose the tile for tokens of ``kv_heads`` heads with ``size`` channels."""
    heads = max(1, min(power_of_2(kv_heads), 4096 // power_of_2(size)))
    warps = heads * power_of_2(size) // (_WARP * _VECTOR)
    return CacheTile(heads, max(1, min(8, warps)))


@functools.cache
def prefill_tile(size: int, itemsize: int, rows: int) -> AttentionTile:
    """Choose the tile for heads of ``size`` channels of ``itemsize`` bytes.

    Args:
        size: channels of a head.
        itemsize: bytes of an element.
        rows: of the longest request: its query tokens times the heads of a group, or an upper
            bound.
    """
    block_d = max(16, power_of_2(size))
    if itemsize == 4:
        return AttentionTile(32, 32, block_d, 4, 1)
    if rows <= 64:
        return AttentionTile(64, 64 if block_d <= 128 else 32, block_d, 4, 3)
    if block_d <= 128:
        return AttentionTile(128, 64, block_d, 8, 2, 128)
    return AttentionTile(128, 32, block_d, 8, 2)


def heads_together(kv_heads: int, read: int) -> int:
    """Return how many key/value heads to prefill side by side: a divisor of ``kv_heads``.

    Args:
        kv_heads: how many there are.
        read: bytes of keys and values of a head that are read at the same time, about.
    """
    return _largest_divisor(kv_heads, min(kv_heads, max(1, _CACHED // read)))


@functools.cache
def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(most, 0, -1) if number % n == 0)


@functools.cache
def decode_tile(size: int, itemsize: int, rows: int, programs: int, longest: int) -> DecodeTile:
    """Choose the tile for few query tokens of heads of ``size`` channels of ``itemsize`` bytes.

    Args:
        size: channels of a head.
        itemsize: bytes of an element.
        rows: query tokens of a request times the heads of a group.
        programs: requests times key/value heads.
        longest: tokens that a request can have at all. Lengths have no say: a captured graph
            meets others than those it was captured with.
    """
    block_d = max(16, power_of_2(size))
    block_m = min(64, max(16, power_of_2(rows)))
    # Measured on an H200. Few programs: small tiles, many of them ahead, to have the first keys
    # sooner. As many parts as run at the same time, and two and a half times as many where whole
    # requests would leave a tail.
    if programs <= 32:
        block_n, stages, wanted = 32, 4, 3 * _BUSY // max(programs, 1)
    elif programs <= 2 * _BUSY:
        block_n, stages, wanted = 64, 3, 2 * _BUSY // programs
    else:
        block_n, stages, wanted = 64, 2, -(-15 * _BUSY // (2 * programs))
    block_n = max(16, min(block_n, 16384 // (block_d * itemsize)))
    splits = max(1, min(wanted, _MOST_SPLITS, longest // _LEAST_KEYS))
    stages = 1 if itemsize == 4 else stages
    return DecodeTile(block_m, block_n, block_d, 4, stages, splits=splits)


def activation_rivals(d: int) -> Iterator[ActivationTile]:
    """Yield every tile worth timing for output rows of ``d`` elements."""
    for block in (256, 512, 1024, 2048, 4096):
        for warps in (1, 2, 4, 8):
            if block <= power_of_2(d) and _VECTOR <= block // (_WARP * warps) <= 4 * _VECTOR:
                yield ActivationTile(block, warps)
                yield ActivationTile(block, warps, "evict_first")


def cache_rivals(kv_heads: int, size: int) -> Iterator[CacheTile]:
    """Yield every tile worth timing for tokens of ``kv_heads`` heads with ``size`` channels."""
    for heads in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8):
            values = heads * power_of_2(size) // (_WARP * warps)
            if heads <= power_of_2(kv_heads) and 2 <= values <= 4 * _VECTOR:
                yield CacheTile(heads, warps)


def prefill_rivals(size: int) -> Iterator[AttentionTile]:
    """Yield every tile worth timing for prefill with 16-bit heads of ``size`` channels."""
    block_d = max(16, power_of_2(size))
    for block_m, warps in ((64, 4), (128, 4), (128, 8), (256, 8)):
        for block_n in (32, 64, 128):
            for stages in (2, 3, 4):
                memory = 2 * block_d * (block_m + (2 * stages + 1) * block_n)
                values = block_m * block_d // (_WARP * warps)
                if memory <= _SHARED and values <= 128:
                    yield AttentionTile(block_m, block_n, block_d, warps, stages)
                    if values <= 64:
                        yield AttentionTile(block_m, block_n, block_d, warps, stages, 128)


def decode_rivals(size: int, rows: int) -> Iterator[DecodeTile]:
    """Yield every tile worth timing for decoding with 16-bit heads of ``size`` channels."""
    block_d = max(16, power_of_2(size))
    block_m = min(64, max(16, power_of_2(rows)))
    for block_n in (32, 64, 128):
        for warps in (2, 4, 8):
            for stages in (2, 3, 4):
                if 2 * block_d * 2 * stages * block_n <= _SHARED // 2:
                    for splits in (1, 2, 3, 4, 8, 16, 32, 64):
                        yield DecodeTile(block_m, block_n, block_d, warps, stages, splits=splits)


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
