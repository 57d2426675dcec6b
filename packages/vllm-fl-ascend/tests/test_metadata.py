"""States and plans of steps."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_fl_ascend.attention.metadata import (
    AttentionState,
    make_metadata,
    plan_decode_window,
    state_of,
)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "decode_queries", "state"),
    [
        ([5, 1], [5, 1], 1, "PREFILL_NO_CACHE"),
        ([5, 3], [5, 9], 1, "PREFILL_CACHE_HIT"),
        ([5, 3], [6, 9], 1, "PREFILL_CACHE_HIT"),
        ([1, 1], [4, 9], 1, "DECODE_ONLY"),
        ([1, 1], [4, 1], 1, "DECODE_ONLY"),
        ([1, 3], [4, 9], 1, "CHUNKED_PREFILL"),
        ([1, 5], [4, 5], 1, "CHUNKED_PREFILL"),
        ([3, 2], [9, 8], 3, "SPEC_DECODING"),
        ([3, 3], [9, 3], 3, "CHUNKED_PREFILL"),
        ([3, 4], [9, 8], 3, "CHUNKED_PREFILL"),
        ([1, 1], [9, 8], 3, "DECODE_ONLY"),
        ([4, 5], [9, 8], 3, "PREFILL_CACHE_HIT"),
    ],
)
def test_states(query_lens, seq_lens, decode_queries, state):
    assert state_of(query_lens, seq_lens, decode_queries) is AttentionState[state]


requests = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=6)


@given(requests, st.integers(0, 3))
def test_requests_without_queries_are_left_out(sizes, padding):
    query_lens = [queries for queries, _ in sizes]
    seq_lens = [queries + context for queries, context in sizes]
    tokens = sum(query_lens)
    table = torch.arange(len(sizes) * 4).view(-1, 4)
    slots = torch.cat((torch.arange(tokens) + 7, torch.full((padding,), -1)))
    step = make_metadata([0, *accumulate(query_lens)], seq_lens, table, slots, 16)
    kept = [r for r, queries in enumerate(query_lens) if queries]
    if not kept:
        assert step is None
        return
    assert step.query_ends == list(accumulate(query_lens[r] for r in kept))
    assert step.seq_lens == [seq_lens[r] for r in kept]
    assert step.num_tokens == tokens
    assert step.slots.tolist() == list(range(7, 7 + tokens))
    assert step.block_table.dtype == torch.int32
    assert torch.equal(step.block_table, table[kept].int())


def test_tokens_without_a_slot_go_to_the_null_block():
    step = make_metadata([0, 2], [2], torch.zeros(1, 1), torch.tensor([-1, 5]), 16)
    assert step.slots.tolist() == [0, 5]


@given(st.lists(st.integers(1, 70), min_size=1, max_size=5), st.integers(1, 80))
def test_a_decode_window_shows_the_last_keys(seq_lens, window):
    block_size, columns = 16, 5
    table = torch.randperm(len(seq_lens) * columns).view(-1, columns).int()
    plan = plan_decode_window(table, seq_lens, window, block_size)
    assert plan.hidden.shape == (len(seq_lens), 1, 1, plan.block_table.shape[1] * block_size)
    for request, length in enumerate(seq_lens):
        wanted = [
            (int(table[request, p // block_size]), p % block_size)
            for p in range(max(0, length - window), length)
        ]
        seen = [
            (int(plan.block_table[request, k // block_size]), k % block_size)
            for k in range(plan.lengths[request])
            if not plan.hidden[request, 0, 0, k]
        ]
        assert seen == wanted


def test_a_plan_is_made_once_for_the_layers_of_a_window():
    step = make_metadata([0, 1], [20], torch.zeros(1, 2), torch.tensor([5]), 16)
    assert step.decode_window(4) is step.decode_window(4)
    assert step.decode_window(4) is not step.decode_window(5)
