"""The conformance kit, every kernel interpreted.

A program takes the interpreter milliseconds whatever its size, so the kernels that a GPU would run
in hundreds of programs are cut into fewer here; the choices for a GPU have their own tests. Of each
operator's check some cases are run, of the checks in FEW one; ``vllm-fl verify flaggems`` runs all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from vllm_fl.testing.suite import Item, parameters, run
from vllm_fl.testing.target import find_target
from vllm_fl_flaggems import tiles
from vllm_fl_flaggems.moe_tiles import (
    AlignTile,
    GroupedTile,
    SumTile,
    TopkTile,
    align_tile,
    grouped_tile,
    sum_tile,
    topk_tile,
)
from vllm_fl_flaggems.ops import align, moe_sum, routing
from vllm_fl_flaggems.tiles import power_of_2

EVERY = 17  # no factor of the number of dtypes or shapes
FEW = ("compile", "determinism", "cache", "canary")


def large_topk(tokens: int, count: int, k: int) -> TopkTile:
    return replace(topk_tile(tokens, count, k), rows=min(128, power_of_2(tokens)))


def large_grouped(count: int, groups: int, k: int, tokens: int) -> GroupedTile:
    return replace(grouped_tile(count, groups, k, tokens), tokens=min(32, power_of_2(tokens)))


def large_align(choices: int, count: int, block: int) -> AlignTile:
    tile = align_tile(choices, count, block)
    strategy = "split" if choices % 2 else "whole"
    return replace(tile, strategy=strategy, experts=max(1, power_of_2(count) // 4), chunk=256)


def large_sum(tokens: int, width: int) -> SumTile:
    return replace(sum_tile(tokens, width), block=power_of_2(width))


@pytest.fixture(autouse=True, scope="module")
def large_tiles() -> Iterator[None]:
    changes: list[tuple[object, str, Callable[..., object]]] = [
        (routing, "topk_tile", large_topk),
        (routing, "grouped_tile", large_grouped),
        (align, "align_tile", large_align),
        (moe_sum, "sum_tile", large_sum),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module, name, choice in changes:
            patch.setattr(module, name, choice)
        yield


@pytest.fixture(autouse=True)
def _few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split requests into three parts at most."""
    monkeypatch.setattr(tiles, "_MOST_SPLITS", 3)
    tiles.decode_tile.cache_clear()


def chosen() -> Iterator[object]:
    """Yield the first, or the second, ... of a check's cases and those at steps from there."""
    checks: dict[tuple[str, str], list[Any]] = {}
    for parameter in parameters(find_target("flaggems", "cpu")):
        case = parameter.values[0].case
        checks.setdefault((case.op_name, case.check), []).append(parameter)
    for number, ((_, check), cases) in enumerate(checks.items()):
        step = min(EVERY, len(cases)) if check in FEW or len(cases) > EVERY else 1
        yield from cases[number % step :: step]


@pytest.mark.parametrize("item", list(chosen()))
def test_conformance(item: Item, record_property: Callable[[str, object], None]) -> None:
    run(item, record_property)
