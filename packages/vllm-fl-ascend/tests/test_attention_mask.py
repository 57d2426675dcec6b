"""Masks against their definition, entry by entry."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_fl_ascend.attention.attention_mask import (
    COMPRESSED_SIZE,
    AttentionMask,
    Corner,
    compressed,
)

sizes = st.integers(1, 40)


def entries(mask):
    queries, keys = mask.visible.shape
    return {(q, k): bool(mask.visible[q, k]) for q in range(queries) for k in range(keys)}


@given(sizes, sizes)
def test_causal_masks_by_corner(queries, keys):
    left = entries(AttentionMask.causal(queries, keys, Corner.LEFT_UP))
    right = entries(AttentionMask.causal(queries, keys, Corner.RIGHT_DOWN))
    assert left == {(q, k): k <= q for q, k in left}
    assert right == {(q, k): k <= q + keys - queries for q, k in right}
    assert [corner.value for corner in Corner] == [2, 3]


@given(sizes, sizes, st.integers(0, 50), st.integers(0, 50))
def test_a_band(queries, keys, before, after):
    band = entries(AttentionMask.band(queries, keys, before, after))
    positions = {q: q + keys - queries for q in range(queries)}
    assert band == {(q, k): -before <= k - positions[q] <= after for q, k in band}


@given(st.lists(st.tuples(sizes, st.integers(0, 30)), min_size=1, max_size=4),
       st.none() | st.integers(1, 20))  # fmt: skip
def test_full_rank_masks_of_several_requests(requests, window):
    query_lens = [queries for queries, _ in requests]
    key_lens = [queries + context for queries, context in requests]
    mask = AttentionMask.full_rank(query_lens, key_lens, window).visible
    assert mask.shape == (len(requests), 1, max(query_lens), max(key_lens))
    for request, (queries, context) in enumerate(requests):
        for q in range(mask.shape[2]):
            seen = {k for k in range(mask.shape[3]) if mask[request, 0, q, k]}
            first = 0 if window is None else max(0, context + q - window + 1)
            assert seen == (set(range(first, context + q + 1)) if q < queries else set())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8])
def test_the_boolean_encoding_is_one_where_hidden(dtype):
    mask = AttentionMask(torch.tensor([[True, False], [True, True]]))
    assert mask.boolean(dtype).dtype == dtype
    assert mask.boolean(dtype).int().tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_additive_encoding_hides_without_nan(dtype):
    mask = AttentionMask(torch.tensor([[True, False], [False, False]]))
    added = mask.additive(dtype)
    assert added.dtype == dtype
    lowest = torch.finfo(dtype).min
    assert added.tolist() == [[0.0, lowest], [lowest, lowest]]
    weights = torch.softmax(torch.tensor([[1.0, 9.0], [2.0, 2.0]]) + added.float(), dim=-1)
    assert weights[0].tolist() == [1.0, 0.0]
    assert weights[1].tolist() == [0.5, 0.5]


def test_encodings_of_other_dtypes_are_refused():
    mask = AttentionMask.causal(2, 2)
    with pytest.raises(ValueError, match="bool, int8 or uint8"):
        mask.boolean(torch.float16)
    with pytest.raises(ValueError, match="of a floating dtype"):
        mask.additive(torch.int8)


def test_the_compressed_mask_is_made_once_a_device_and_dtype():
    cpu = torch.device("cpu")
    mask = compressed(cpu)
    assert mask.shape == (COMPRESSED_SIZE, COMPRESSED_SIZE)
    assert mask.dtype == torch.int8
    assert torch.equal(mask, torch.ones_like(mask).triu(1))
    assert compressed(cpu) is mask
    assert compressed(cpu, torch.bool) is not mask
    assert torch.equal(compressed(cpu, torch.bool), mask.bool())
