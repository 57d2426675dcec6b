"""Rotary embedding against a float64 oracle that rotates complex numbers one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fl_reference.ops.rotary import rotary_embedding

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Absolute, for inputs below 4: the products, the sum and the rounded table, each one rounding.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-2, torch.bfloat16: 8e-2}
MAX_POSITION = 50


def normal(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).clamp(-4, 4).to(dtype)


def table(half: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    frequency = 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(MAX_POSITION, dtype=torch.float64)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def positions(tokens: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, MAX_POSITION, (tokens,), generator=generator).to(dtype)


def oracle(x: Tensor, cos: Tensor, sin: Tensor, ids: Tensor, is_neox_style: bool) -> Tensor:
    out = x.double().clone()
    half = cos.shape[1]
    for token in range(x.shape[0]):
        turn = torch.complex(cos[ids[token]].double(), sin[ids[token]].double())
        for pair in range(half):
            a, b = (pair, pair + half) if is_neox_style else (2 * pair, 2 * pair + 1)
            turned = torch.complex(x[token, :, a].double(), x[token, :, b].double()) * turn[pair]
            out[token, :, a], out[token, :, b] = turned.real, turned.imag
    return out.to(x.dtype)


def check(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[out.dtype])


@PROPERTY
@given(
    st.integers(0, 5),
    st.sampled_from([(1, 1), (2, 1), (3, 3)]),
    st.sampled_from([(2, 2), (8, 8), (8, 4), (7, 6), (33, 32), (20, 10)]),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_matches_the_oracle(
    tokens: int,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    dtype: torch.dtype,
    id_dtype: torch.dtype,
    is_neox_style: bool,
    packed: bool,
    seed: int,
) -> None:
    head_size, rotary_dim = sizes
    if packed:
        width = (heads[0] + heads[1] + 1) * head_size
        qkv = normal(tokens, width, dtype=dtype, seed=seed)
        query, key, _ = (
            part.unflatten(1, (-1, head_size))
            for part in qkv.split([heads[0] * head_size, heads[1] * head_size, head_size], dim=1)
        )
    else:
        query = normal(tokens, heads[0], head_size, dtype=dtype, seed=seed)
        key = normal(tokens, heads[1], head_size, dtype=dtype, seed=seed + 1)
    before = query.clone(), key.clone()
    cos, sin = table(rotary_dim // 2)
    ids = positions(tokens, seed, id_dtype)
    new_query, new_key = rotary_embedding(query, key, cos, sin, ids, is_neox_style)
    for new, old in ((new_query, query), (new_key, key)):
        assert new.dtype == dtype
        check(new, oracle(old, cos.to(dtype), sin.to(dtype), ids, is_neox_style))
        assert torch.equal(new[..., rotary_dim:], old[..., rotary_dim:])
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_the_other_style_is_another_result(is_neox_style: bool) -> None:
    query, (cos, sin), ids = normal(4, 2, 8), table(4), positions(4)
    out, _ = rotary_embedding(query, None, cos, sin, ids, is_neox_style)
    with pytest.raises(AssertionError):
        check(out, oracle(query, cos, sin, ids, not is_neox_style))


def test_both_styles_agree_after_reordering_the_channels() -> None:
    query, (cos, sin), ids = normal(6, 2, 16), table(8), positions(6)
    interleave = torch.arange(16).view(2, 8).T.flatten()
    neox, _ = rotary_embedding(query, None, cos, sin, ids, True)
    pairs, _ = rotary_embedding(query[..., interleave], None, cos, sin, ids, False)
    assert torch.equal(neox[..., interleave], pairs)


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("head_size", [64, 192, 256, 512])
def test_norms_are_preserved_and_the_inverse_turns_back(
    head_size: int, is_neox_style: bool
) -> None:
    query, (cos, sin), ids = normal(5, 64, head_size), table(head_size // 2), positions(5)
    out, _ = rotary_embedding(query, None, cos, sin, ids, is_neox_style)
    torch.testing.assert_close(out.norm(dim=-1), query.norm(dim=-1), rtol=1e-5, atol=0)
    back, _ = rotary_embedding(out, None, cos, -sin, ids, is_neox_style)
    torch.testing.assert_close(back, query, rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_position_zero_changes_nothing(dtype: torch.dtype, is_neox_style: bool) -> None:
    query, (cos, sin) = normal(3, 2, 12, dtype=dtype), table(6)
    ids = torch.zeros(3, dtype=torch.int64)
    out, key = rotary_embedding(query, None, cos, sin, ids, is_neox_style)
    assert torch.equal(out, query)
    assert key is None


def test_scores_depend_on_the_distance_alone() -> None:
    query, key, (cos, sin) = normal(1, 1, 32), normal(1, 1, 32, seed=1), table(16)

    def score(at: int, other: int) -> Tensor:
        q, _ = rotary_embedding(query, None, cos, sin, torch.tensor([at]), True)
        k, _ = rotary_embedding(key, None, cos, sin, torch.tensor([other]), True)
        return (q * k).sum()

    torch.testing.assert_close(score(9, 2), score(30, 23), rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_rope_part_of_latent_attention(is_neox_style: bool) -> None:
    query = normal(3, 4, 192)[..., 128:]
    key = normal(3, 1, 576, seed=1)[..., 512:]
    (cos, sin), ids = table(32), positions(3)
    new_query, new_key = rotary_embedding(query, key, cos, sin, ids, is_neox_style)
    check(new_query, oracle(query, cos, sin, ids, is_neox_style))
    check(new_key, oracle(key, cos, sin, ids, is_neox_style))


def test_traces_without_a_graph_break() -> None:
    query, key, (cos, sin), ids = normal(5, 4, 16), normal(5, 2, 16, seed=1), table(6), positions(5)
    compiled = torch.compile(rotary_embedding, fullgraph=True, backend="eager")
    for is_neox_style in (True, False):
        expected = rotary_embedding(query, key, cos, sin, ids, is_neox_style)
        for ours, plain in zip(
            compiled(query, key, cos, sin, ids, is_neox_style), expected, strict=True
        ):
            assert torch.equal(ours, plain)


def test_arguments_that_do_not_fit_are_refused() -> None:
    query, (cos, sin), ids = torch.zeros(3, 2, 8), table(4), positions(3)

    def call(**changes: Tensor) -> None:
        arguments = {"query": query, "key": query, "cos": cos, "sin": sin, "position_ids": ids}
        rotary_embedding(**(arguments | changes), is_neox_style=True)

    with pytest.raises(ValueError, match="rotary_dim 10 is larger than query's head size 8"):
        call(cos=torch.zeros(9, 5), sin=torch.zeros(9, 5))
    with pytest.raises(ValueError, match="rotary_dim 8 is larger than key's head size 7"):
        call(key=torch.zeros(3, 2, 7))
    with pytest.raises(ValueError, match=r"cos and sin must both be"):
        call(sin=torch.zeros(MAX_POSITION, 3))
    with pytest.raises(ValueError, match=r"cos and sin must both be"):
        call(cos=torch.zeros(9, 0), sin=torch.zeros(9, 0))
    with pytest.raises(ValueError, match=r"query must be \[2 tokens, heads, head_size\]"):
        call(position_ids=positions(2))
    with pytest.raises(ValueError, match=r"key must be \[3 tokens, heads, head_size\]"):
        call(key=torch.zeros(4, 2, 8))
    with pytest.raises(ValueError, match=r"query must be .* got \(3, 16\)"):
        call(query=torch.zeros(3, 16))
    with pytest.raises(ValueError, match="position_ids must be a vector of integers"):
        call(position_ids=torch.zeros(3))
