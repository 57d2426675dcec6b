"""The token counts that make Triton compile every variant of the kernels outside attention.

Triton compiles a kernel anew for each dtype, constexpr, and class of an integer argument: 1, a
multiple of 16, or another. What grows with the number of tokens is not classed in these kernels
(``do_not_specialize``) or is the grid, and strides come from the layer: only the choice of a tile
is left. Norms, activations and rotary have two tiles at most, for few tokens and for many, so the
fewest and the most tokens reach both. Experts and their routing have more, and the choices are
followed: pure functions, asked without a launch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from vllm_fl.dispatch.backend import ExpertsShape
from vllm_fl_flaggems.moe_tiles import (
    ExpertsTile,
    align_tile,
    experts_tile,
    grouped_tile,
    sum_tile,
    topk_tile,
)


def token_ranges(most: int, experts: Iterable[ExpertsShape], memory: int) -> list[range]:
    """Return ranges of token counts in which the same variants run.

    Args:
        most: the largest number of tokens of a step.
        experts: the mixture-of-experts layers.
        memory: bytes of shared memory that a program can have.
    """
    found = [range(1, 2), range(most, most + 1)]
    for shape in experts:
        for choice in tile_choices(shape, memory):
            found += stretches(choice, most)
    return list(dict.fromkeys(found))


def stretches(choice: Callable[[int], object], most: int) -> Iterator[range]:
    """Yield the ranges of 1 to ``most`` in which a choice stays; none may come back after another.

    The choice is asked for a few numbers alone, by bisection.
    """
    first = 1
    while first <= most:
        chosen = choice(first)
        others = range(first + 1, most + 1)
        end = first + 1 + bisect_left(others, True, key=lambda n: choice(n) != chosen)
        yield range(first, end)
        first = end


def tile_choices(shape: ExpertsShape, memory: int) -> tuple[Callable[[int], object], ...]:
    """Return, for each kernel of a layer, what decides about its variant from the step's tokens.

    Args:
        shape: the layer.
        memory: bytes of shared memory that a program can have.
    """
    s = shape

    def products(tokens: int) -> ExpertsTile:
        # Not through the cache, which would keep what no step ever has.
        return experts_tile.__wrapped__(tokens, s.k, s.local, s.hidden, s.inner, s.itemsize, memory)

    def sorting(tokens: int) -> object:
        tile = products(tokens)
        return None if tile.direct else (tile.rows, align_tile(tokens * s.k, s.experts, tile.rows))

    def product(tile: ExpertsTile, name: str) -> object:
        return tile.direct, tile.rows, getattr(tile, name)

    choices: tuple[Callable[[int], object], ...] = (
        lambda tokens: topk_tile(tokens, s.routed, s.k),
        lambda tokens: grouped_tile(s.routed, s.groups, s.k, tokens),
        sorting,
        lambda tokens: product(products(tokens), "up"),
        lambda tokens: product(products(tokens), "down"),
        lambda tokens: sum_tile(tokens, s.hidden),
    )
    return tuple(partial(_gathered, choice, s.ranks) for choice in choices)


def _gathered(choice: Callable[[int], object], ranks: int, tokens: int) -> object:
    return choice(tokens * ranks)
