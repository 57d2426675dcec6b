"""The choice of tiles: what must hold for every shape."""

from __future__ import annotations

import dataclasses

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


SHARED = 227 * 1024  # bytes that a program can have on Hopper


def fits(tile: tiles.AttentionTile, itemsize: int) -> bool:
    elements = tile.block_d * (tile.block_m + 2 * tile.stages * tile.block_n)
    return elements * itemsize <= SHARED


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("size", [16, 46, 64, 80, 96, 112, 128, 192, 256])
def test_attention(size: int, itemsize: int) -> None:
    for rows in (4, 64, 65, 1 << 20):
        prefill = tiles.prefill_tile(size, itemsize, rows)
        assert size <= prefill.block_d < max(2 * size, 17)
        assert fits(prefill, itemsize)
    for rows in (1, 4, 16, 17, 71, 500):
        for programs in (1, 8, 512, 5000):
            tile = tiles.decode_tile(size, itemsize, rows, programs, 4096)
            assert 16 <= tile.block_m <= 64
            assert tile.tokens(rows) >= 1
            assert fits(tile, itemsize)
            assert 1 <= tile.splits <= 64


def test_splits_fill_the_device_and_no_more() -> None:
    splits = [tiles.decode_tile(128, 2, 4, programs, 1 << 20).splits for programs in (8, 64, 1024)]
    assert splits == sorted(splits, reverse=True)
    assert splits[0] * 8 >= 2 * 132
    assert splits[-1] == 1
    assert tiles.decode_tile(128, 2, 4, 8, 256).splits <= 2


@pytest.mark.parametrize(("kv_heads", "size"), [(1, 64), (8, 128), (40, 80), (128, 256)])
def test_cache(kv_heads: int, size: int) -> None:
    tile = tiles.cache_tile(kv_heads, size)
    assert is_power_of_2(tile.heads)
    assert is_power_of_2(tile.warps)
    assert tile in list(tiles.cache_rivals(kv_heads, size))


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
        assert tiles.prefill_tile(width, 2, 4096) in list(tiles.prefill_rivals(width))
        for programs in (8, 512, 1024):
            tile = tiles.decode_tile(width, 2, 4, programs, 4096)
            shapes = {
                dataclasses.replace(rival, splits=1) for rival in tiles.decode_rivals(width, 4)
            }
            assert dataclasses.replace(tile, splits=1) in shapes
        for heads in (40, 2560, 327680):
            assert tiles.rotary_tile(heads, width) in list(tiles.rotary_rivals(width))


def test_heads_side_by_side_share_the_cache() -> None:
    megabyte = 1 << 20
    assert [tiles.heads_together(8, n * megabyte) for n in (1, 2, 4, 8, 16, 64)] == [
        8,
        8,
        4,
        2,
        1,
        1,
    ]
    assert tiles.heads_together(6, 4 * megabyte) == 3
    assert tiles.heads_together(1, 1) == 1
