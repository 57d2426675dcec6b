"""The choice of tiles for mixtures of experts: what must hold for every shape."""

from __future__ import annotations

import dataclasses

import pytest

from vllm_fl_flaggems import moe_tiles as tiles

H200 = 227 * 1024
MODELS = [(128, 8, 2048, 768), (8, 2, 4096, 14336), (256, 8, 7168, 2048), (5, 2, 64, 48)]


def is_power_of_2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("experts", [1, 5, 128, 160, 512, 4096])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_topk(tokens: int, experts: int) -> None:
    tile = tiles.topk_tile(tokens, experts, min(8, experts))
    assert experts <= tile.block
    assert all(map(is_power_of_2, (tile.rows, tile.block, tile.slots, tile.warps)))
    assert tile.rows * tile.block // (32 * tile.warps) <= 32  # values of a thread


@pytest.mark.parametrize("tokens", [1, 64, 4096])
@pytest.mark.parametrize(
    ("experts", "groups"), [(60, 5), (256, 8), (256, 16), (256, 32), (4096, 1), (4096, 2048)]
)
def test_grouped(tokens: int, experts: int, groups: int) -> None:
    tile = tiles.grouped_tile(experts, groups, 8, tokens)
    assert tile.groups >= groups
    assert tile.members >= experts // groups
    assert all(map(is_power_of_2, (tile.groups, tile.members, tile.slots)))
    assert tile.groups * tile.members // (32 * tile.warps) <= 16  # values of a thread, of a token
    assert tile in list(tiles.grouped_rivals(experts, groups, 8))


def test_many_tokens_of_deepseek_v3() -> None:
    tile = tiles.GroupedTile(tokens=4, groups=8, members=32, slots=8, warps=1)
    assert tiles.grouped_tile(256, 8, 8, 4096) == tile
    assert tiles.grouped_tile(256, 8, 8, 64) == dataclasses.replace(tile, tokens=1)


@pytest.mark.parametrize("experts", [1, 60, 128, 512, 4096])
@pytest.mark.parametrize("choices", [1, 8, 512, 2560, 32768, 262144])
def test_align(choices: int, experts: int) -> None:
    tile = tiles.align_tile(choices, experts, 48)
    assert tile.bins >= experts
    assert tile.pad >= 48
    assert all(map(is_power_of_2, (tile.experts, tile.chunk, tile.warps, tile.bins, tile.pad)))
    assert -(-experts // tile.experts) <= 132
    assert tile in list(tiles.align_rivals(choices, experts, 48))


@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 128, 256, 1024, 32768])
@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("memory", [H200, 99 * 1024, 64 * 1024])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_experts(tokens: int, model: tuple[int, ...], memory: int, itemsize: int) -> None:
    experts, k, hidden, inner = model
    chosen = tiles.experts_tile(tokens, k, experts, hidden, inner, itemsize, memory)
    assert is_power_of_2(chosen.rows)
    for tile in (chosen.up, chosen.down):
        assert (chosen.rows + tile.columns) * tile.depth * itemsize * tile.stages <= memory
        assert tile.columns >= 32
        assert tile.depth >= 16
        assert chosen.rows * tile.columns // (32 * tile.warps) <= 128  # fp32 values of a thread
    assert chosen in list(tiles.experts_rivals(chosen, itemsize, memory))


def test_a_single_token_is_not_sorted() -> None:
    assert tiles.experts_tile(1, 8, 128, 2048, 768, 2, H200).direct
    assert not tiles.experts_tile(64, 8, 128, 2048, 768, 2, H200).direct


def test_a_single_token_keeps_the_memory_busy() -> None:
    mixtral = tiles.experts_tile(1, 2, 8, 4096, 14336, 2, H200)
    assert mixtral.up == tiles.MatmulTile(128, 128, 4, 3, swap=True)  # 448 programs
    assert mixtral.down == tiles.MatmulTile(64, 256, 4, 4, swap=True)  # 128, not 64
    qwen = tiles.experts_tile(1, 8, 128, 2048, 768, 2, H200)
    assert qwen.up == qwen.down == mixtral.up
    assert len(list(tiles.experts_rivals(mixtral, 2, H200))) == 7


def test_more_tokens_get_more_rows() -> None:
    rows = [
        tiles.experts_tile(t, 8, 128, 2048, 768, 2, H200).rows for t in (64, 256, 512, 1024, 4096)
    ]
    assert rows == [16, 32, 64, 64, 128]
