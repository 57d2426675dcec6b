"""moe_align_block_size: both strategies against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import PROPERTY
from torch import Tensor

from vllm_fl_flaggems.kernels import align as kernels
from vllm_fl_flaggems.moe_tiles import AlignTile, align_tile, power_of_2
from vllm_fl_flaggems.ops import align
from vllm_fl_reference.ops import moe as reference

FEW = settings(PROPERTY, max_examples=14)


def canonical(returned: tuple[Tensor, ...], ids: Tensor, block: int) -> list[list[int]]:
    """Return the results with the entries of each run of one expert in ascending order."""
    entries, experts, used = (result.tolist() for result in returned)
    flat = ids.flatten().tolist()

    def key(place: int) -> tuple[int, int]:
        owners = [flat[e] for e in entries[place // block * block :][:block] if e < len(flat)]
        return (max(owners, default=1 << 30) if place < used[0] else 1 << 31, entries[place])

    runs = sorted(key(place) for place in range(len(entries)))
    return [[entry for _, entry in runs], experts, used]


def choices(tokens: int, k: int, experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, experts + 1, (tokens, k), generator=generator, dtype=torch.int32)


@FEW
@given(
    st.integers(1, 20),
    st.integers(1, 4),
    st.sampled_from([1, 3, 9, 33]),
    st.sampled_from([1, 4, 16, 48]),
    st.sampled_from(["whole", "split"]),
    st.sampled_from([1, 4]),
    st.sampled_from(["", "label", "local"]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_strategies(
    tokens: int,
    k: int,
    experts: int,
    block: int,
    strategy: str,
    own: int,
    mapped: str,
    dtype: torch.dtype,
) -> None:
    ids = choices(tokens, k, experts, seed=tokens).to(dtype)
    expert_map = None
    if mapped:
        here = torch.arange(experts) % 2 == 1
        expert_map = torch.where(here, here.cumsum(0) - 1, -1).int()
    pad = tokens % 2 == 0
    call = (ids, block, experts, expert_map, pad, mapped == "local")
    expected = reference.moe_align_block_size(*call)
    found = [torch.full_like(result, -9) for result in expected]
    tile = AlignTile(strategy, own, 32, 1, max(32, power_of_2(experts)), power_of_2(block))
    some = kernels.Choices(ids, experts, experts, expert_map, mapped == "local")
    kernels.align(*found, some, block, tile)
    order = ids
    if mapped == "local":
        known = (ids >= 0) & (ids < experts)
        order = torch.where(known, expert_map[ids.clamp(0, experts - 1).long()].to(dtype), -1)
    assert canonical(tuple(found), order, block) == canonical(expected, order, block)


@pytest.mark.parametrize(("tokens", "k", "experts", "block"), [(1, 8, 40, 16), (30, 10, 24, 16)])
def test_chosen_tiles(tokens: int, k: int, experts: int, block: int) -> None:
    ids = choices(tokens, k, experts, seed=1)
    found = align.moe_align_block_size(ids, block, experts)
    expected = reference.moe_align_block_size(ids, block, experts)
    assert [result.shape for result in found] == [result.shape for result in expected]
    assert canonical(found, ids, block) == canonical(expected, ids, block)


def test_many_choices_are_split() -> None:
    assert align_tile(4096 * 8, 128, 64).strategy == "split"
    assert align_tile(8, 128, 16).strategy == "whole"


def test_no_tokens() -> None:
    found = align.moe_align_block_size(torch.empty(0, 2, dtype=torch.int32), 16, 4)
    assert [result.tolist() for result in found] == [[], [], [0]]


def test_what_is_declined_has_a_reason() -> None:
    ids = torch.zeros(3, 2, dtype=torch.int32)
    assert align.supports(ids, 16, 4) is True
    assert "dtype torch.int16" in str(align.supports(ids.short(), 16, 4))
    assert "not contiguous" in str(
        align.supports(torch.zeros(3, 4, dtype=torch.int32)[:, :2], 16, 4)
    )
    assert "4097 experts" in str(align.supports(ids, 16, 4097))
    assert "blocks of 0" in str(align.supports(ids, 0, 4))
    assert "vector of 4" in str(align.supports(ids, 16, 4, torch.zeros(3, dtype=torch.int32)))
    assert "expert_map has dtype" in str(align.supports(ids, 16, 4, torch.zeros(4)))
