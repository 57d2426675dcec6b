"""The slot mapping that replaces vLLM's Triton kernel."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fl_reference.kernels import compute_slot_mapping


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=5),
    st.sampled_from([1, 3, 16]),
)
def test_slots(requests, block_size):
    """Each request has (scheduled tokens, tokens before); blocks are numbered at random."""
    counts = [count for count, _ in requests]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = [before + i for count, before in requests for i in range(count)]
    blocks = torch.randperm(len(requests) * 30).view(len(requests), 30).to(torch.int32)
    slots = torch.full((sum(counts) + 4,), 77)
    compute_slot_mapping(starts, torch.tensor(positions + [5] * 4), blocks, slots, block_size)
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    expected = [
        int(blocks[row, position // block_size]) * block_size + position % block_size
        for row, position in zip(rows, positions, strict=True)
    ]
    assert slots.tolist() == [*expected, -1, -1, -1, -1]
