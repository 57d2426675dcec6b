"""rotary_embedding against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensors import DTYPES, PROPERTY, normal, others_kept, place
from torch import Tensor

from vllm_fl_flaggems.ops import rotary
from vllm_fl_reference.ops import rotary as reference

POSITIONS = 50


def tables(half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin as vLLM has them: the halves of one table."""
    angles = torch.arange(POSITIONS)[:, None] * torch.logspace(0, -3, half)[None, :]
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
    cos, sin = cache.chunk(2, dim=-1)
    return cos, sin


def positions(tokens: int) -> Tensor:
    return torch.randint(0, POSITIONS, (tokens,), generator=torch.Generator().manual_seed(tokens))


def same(found: Tensor | None, expected: Tensor | None) -> None:
    if expected is None:
        assert found is None
        return
    assert found.dtype == expected.dtype
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(found, expected)


@PROPERTY
@given(
    st.integers(1, 5),
    st.sampled_from([(1, 1), (4, 1), (5, 3), (8, 0)]),
    st.sampled_from([(16, 16), (80, 80), (96, 64), (24, 12), (112, 112), (66, 66)]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from(["contiguous", "offset", "wide rows", "packed", "swapped"]),
)
def test_matches_the_reference(
    tokens: int,
    heads: tuple[int, int],
    size: tuple[int, int],
    dtype: torch.dtype,
    neox: bool,
    layout: str,
) -> None:
    head, rotated = size
    query, query_base = place(normal(tokens, heads[0], head), dtype, layout)
    key, key_base = None, None
    if heads[1]:
        key, key_base = place(normal(tokens, heads[1], head, seed=1), dtype, layout)
    cos, sin = tables(rotated // 2, dtype)
    call = (cos, sin, positions(tokens), neox)
    expected = reference.rotary_embedding(query, key, *call)
    found = rotary.rotary_embedding(query, key, *call)
    same(found[0], expected[0])
    same(found[1], expected[1])
    assert others_kept(query, query_base)
    assert key is None or others_kept(key, key_base)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("head", [64, 128, 192, 256, 512])
def test_head_sizes(head: int, neox: bool) -> None:
    query, key = normal(3, 2, head).to(torch.bfloat16), normal(3, 1, head).to(torch.bfloat16)
    call = (*tables(head // 2, torch.bfloat16), positions(3), neox)
    expected = reference.rotary_embedding(query, key, *call)
    norms = query.float().norm(dim=-1)
    found = rotary.rotary_embedding(query, key, *call)
    same(found[0], expected[0])
    same(found[1], expected[1])
    torch.testing.assert_close(found[0].float().norm(dim=-1), norms, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("neox", [True, False])
def test_query_and_key_of_a_packed_projection_are_rotated_in_place(neox: bool) -> None:
    packed = normal(6, 8 * 64).to(torch.float16)
    before = packed.clone()
    query = packed[:, : 5 * 64].view(6, 5, 64)
    key = packed[:, 5 * 64 : 6 * 64].view(6, 1, 64)
    call = (*tables(16, torch.float16), positions(6), neox)
    expected = reference.rotary_embedding(query, key, *call)
    found = rotary.rotary_embedding(query, key, *call)
    assert found[0] is query
    assert found[1] is key
    same(query, expected[0])
    same(key, expected[1])
    assert torch.equal(query[..., 32:], before[:, : 5 * 64].view(6, 5, 64)[..., 32:])
    assert torch.equal(packed[:, 6 * 64 :], before[:, 6 * 64 :])


@pytest.mark.parametrize("neox", [True, False])
def test_slices_of_heads(neox: bool) -> None:
    query = normal(4, 3, 192).to(torch.bfloat16)[..., 128:]
    key = normal(4, 1, 576).to(torch.bfloat16)[..., 512:]
    call = (*tables(32, torch.bfloat16), positions(4).int(), neox)
    expected = reference.rotary_embedding(query, key, *call)
    found = rotary.rotary_embedding(query, key, *call)
    same(found[0], expected[0])
    same(found[1], expected[1])


@pytest.mark.parametrize("neox", [True, False])
def test_overlapping_heads_are_not_written_in_place(neox: bool) -> None:
    one = normal(4, 1, 24)
    key = one.expand(4, 3, 24)
    query, before = normal(4, 2, 24), one.clone()
    call = (*tables(6, torch.float32), positions(4), neox)
    expected = reference.rotary_embedding(query, key, *call)
    found = rotary.rotary_embedding(query, key, *call)
    same(found[0], expected[0])
    same(found[1], expected[1])
    assert torch.equal(one, before)


def test_fp32_tables_are_rounded_to_the_input() -> None:
    query = normal(3, 2, 32).to(torch.bfloat16)
    call = (*tables(16, torch.float32), positions(3), True)
    expected = reference.rotary_embedding(query, None, *call)
    same(rotary.rotary_embedding(query, None, *call)[0], expected[0])


def test_no_tokens() -> None:
    query, key = torch.empty(0, 4, 16), torch.empty(0, 1, 16)
    call = (*tables(8, torch.float32), positions(0), True)
    assert rotary.rotary_embedding(query, key, *call) == (query, key)


def test_what_is_declined_has_a_reason() -> None:
    query, key = torch.empty(3, 2, 16), torch.empty(3, 1, 16)
    cos, sin = tables(8, torch.float32)
    at = positions(3)
    assert rotary.supports(query, key, cos, sin, at, True) is True
    assert rotary.supports(query, None, cos, sin, at, True) is True
    wide = tables(9, torch.float32)
    refused = {
        "query: rank 2": (query[0], key, cos, sin, at),
        "query: the last dimension": (torch.empty(3, 16, 2).mT, key, cos, sin, at),
        "query: 18 rotated channels": (query, key, *wide, at),
        "another dtype or head size": (query, key.half(), cos, sin, at),
        "laid out alike": (query, key, cos, sin.contiguous(), at),
        "int32 or int64": (query, key, cos, sin, at.float()),
        "position_ids is not contiguous": (query, key, cos, sin, at.repeat(2)[::2]),
        "dtypes": (query, key, cos.double(), sin.double(), at),
    }
    for reason, arguments in refused.items():
        assert reason in str(rotary.supports(*arguments, True))
