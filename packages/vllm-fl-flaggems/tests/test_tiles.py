"""The choice of tiles: what must hold for every shape."""

from __future__ import annotations

import pytest

from vllm_fl_flaggems import tiles

ROWS = (1, 2, 7, 64, 256, 2048, 8192, 1 << 20)
WIDTHS = (1, 3, 8, 100, 128, 2048, 3072, 4096, 7168, 12288, 16384, 32768)


def is_power_of_2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("n", [*range(1, 70), 2047, 2048, 2049])
def test_power_of_2(n: int) -> None:
    assert is_power_of_2(tiles.power_of_2(n))
    assert n <= tiles.power_of_2(n) < 2 * n


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_activation(rows: int, d: int) -> None:
    tile = tiles.activation_tile(rows, d)
    assert is_power_of_2(tile.block)
    assert is_power_of_2(tile.warps)
    assert tile.block < 2 * d
    assert rows * -(-d // tile.block) < 2**31


@pytest.mark.parametrize("n", WIDTHS)
def test_norm(n: int) -> None:
    tile = tiles.norm_tile(n)
    assert n <= tile.block < 2 * n
    assert is_power_of_2(tile.rows)
    assert is_power_of_2(tile.warps)
    values = tile.rows * tile.block // (32 * tile.warps)
    assert values <= 32  # fp32 registers of a thread
    # With fewer than a vector a thread, the number of rows would change how one is summed.
    assert values >= 8


@pytest.mark.parametrize("half", [1, 6, 32, 40, 64, 96, 128, 256])
@pytest.mark.parametrize("heads", [1, 40, 40 * 64, 40 * 8192])
def test_rotary(heads: int, half: int) -> None:
    tile = tiles.rotary_tile(heads, half)
    assert is_power_of_2(tile.heads)
    assert is_power_of_2(tile.warps)
    assert tile.heads * tiles.power_of_2(half) // (32 * tile.warps) <= 32


def test_few_heads_are_spread_over_more_programs() -> None:
    few, many = tiles.rotary_tile(40, 64), tiles.rotary_tile(40 * 8192, 64)
    assert 40 / few.heads >= 4
    assert many.heads > few.heads


@pytest.mark.parametrize("width", [64, 128, 2048, 4096, 8192, 12288])
def test_the_choice_is_among_its_rivals(width: int) -> None:
    if width >= 512:
        for rows in ROWS:
            assert tiles.activation_tile(rows, width) in list(tiles.activation_rivals(width))
    assert tiles.norm_tile(width) in list(tiles.norm_rivals(width))
    if width <= 256:
        for heads in (40, 2560, 327680):
            assert tiles.rotary_tile(heads, width) in list(tiles.rotary_rivals(width))
