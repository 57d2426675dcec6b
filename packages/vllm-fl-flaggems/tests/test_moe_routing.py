"""topk_softmax and grouped_topk against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import DTYPES, PROPERTY, normal, place
from torch import Tensor

from vllm_fl_flaggems.ops import routing
from vllm_fl_reference.ops import routing as reference

FEW = settings(PROPERTY, max_examples=15)


def outputs(tokens: int, k: int, indices: torch.dtype = torch.int32) -> tuple[Tensor, ...]:
    weights = torch.full((tokens, k), torch.nan)
    return weights, torch.full((tokens, k), -7, dtype=indices), torch.full_like(weights, -7).int()


def choose(module: object, logits: Tensor, k: int, renormalize: bool = False) -> tuple[Tensor, ...]:
    outs = outputs(len(logits), k)
    returned = module.topk_softmax(*outs, logits, renormalize)
    assert returned[0] is outs[0]
    assert returned[1] is outs[1]
    return outs


def same_choice(logits: Tensor, k: int, renormalize: bool = False) -> None:
    found, expected = (choose(module, logits, k, renormalize) for module in (routing, reference))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


@FEW
@given(
    st.integers(1, 6),
    st.sampled_from([1, 2, 5, 33, 100]),
    st.integers(1, 20),
    st.sampled_from(DTYPES),
    st.sampled_from(["contiguous", "offset", "wide rows"]),
    st.booleans(),
    st.booleans(),
)
def test_topk_softmax(
    tokens: int,
    experts: int,
    k: int,
    dtype: torch.dtype,
    layout: str,
    renormalize: bool,
    ties: bool,
) -> None:
    values = normal(tokens, experts, seed=experts)
    logits, _ = place((values * 2).round() / 2 if ties else values, dtype, layout)
    same_choice(logits, min(k, experts), renormalize)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_of_both_signs_tie(dtype: torch.dtype) -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0, -0.0]], dtype=dtype)
    assert choose(routing, logits, 4)[1].tolist() == [[0, 1, 3, 4]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_experts_come_last(dtype: torch.dtype) -> None:
    logits = torch.full((2, 40), -torch.inf, dtype=dtype)
    logits[0, 7], logits[0, 33] = -2.0, -1.0
    logits[1] = 1.0
    weights, indices, _ = choose(routing, logits, 4)
    assert indices.tolist() == [[33, 7, 0, 1], [0, 1, 2, 3]]
    assert weights[0, 2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_logits(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    tiny = torch.finfo(dtype).tiny
    logits = torch.tensor([[tiny, -tiny, 0.0, -top, 100.0, -100.0]], dtype=dtype)
    # By logit, also where the probabilities round to the same number.
    assert choose(routing, logits, 4)[1].tolist() == [[4, 0, 2, 1]]
    logits = torch.tensor([[0.0, top, -top, 1.0]], dtype=dtype)
    assert choose(routing, logits, 4)[1].tolist() == [[1, 3, 0, 2]]


def test_no_tokens() -> None:
    assert choose(routing, torch.empty(0, 8), 2)[0].shape == (0, 2)
    assert routing.grouped_topk(torch.empty(0, 8), 2, 1, 2, True, 1.0, None)[1].shape == (0, 2)


def test_long_indices() -> None:
    outs = outputs(3, 2, torch.int64)
    logits = normal(3, 9)
    routing.topk_softmax(*outs, logits)
    assert torch.equal(outs[1], logits.topk(2).indices)


@FEW
@given(
    st.integers(1, 4),
    st.sampled_from(
        [(4, 2, 1, 2), (12, 3, 2, 5), (16, 4, 4, 3), (5, 1, 1, 5), (60, 5, 2, 18), (256, 8, 4, 8)]
    ),
    st.sampled_from(DTYPES),
    st.sampled_from(["contiguous", "wide rows"]),
    st.booleans(),
    st.sampled_from([None, torch.float32, torch.bfloat16]),
    st.booleans(),
    st.sampled_from([0, 1]),
)
def test_grouped_topk(
    tokens: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    layout: str,
    ties: bool,
    bias_dtype: torch.dtype | None,
    renormalize: bool,
    scoring: int,
) -> None:
    experts, groups, chosen, k = sizes
    values = normal(tokens, experts, seed=experts)
    scores, _ = place(values.abs().round() + 1 if ties else values.abs() + 0.5, dtype, layout)
    bias = None if bias_dtype is None else normal(experts, seed=3).round().to(bias_dtype)
    call = (scores, groups, chosen, k, renormalize, 2.5, bias, scoring)
    found, expected = routing.grouped_topk(*call), reference.grouped_topk(*call)
    if not (scoring and not ties):  # sigmoids may round to the same value in other places
        assert torch.equal(found[1], expected[1])
    order, other = found[1].sort(-1), expected[1].sort(-1)
    assert torch.equal(order.values, other.values)
    torch.testing.assert_close(
        found[0].gather(1, order.indices), expected[0].gather(1, other.indices)
    )


def test_what_is_declined_has_a_reason() -> None:
    logits = torch.empty(3, 8)
    good = outputs(3, 2)
    assert routing.supports_topk(*good, logits) is True
    refused = {
        "not contiguous": (*good, torch.empty(8, 3).t()),
        "dtype torch.float64": (*good, logits.double()),
        "not between 1 and 8": (*outputs(3, 9), logits),
        "4097 experts": (*good, torch.empty(3, 4097)),
        "contiguous matrix of 3 x 2": (*outputs(2, 2), logits),
        "topk_weights has dtype": (good[0].half(), *good[1:], logits),
        "topk_indices has dtype": (good[0], good[1].short(), good[2], logits),
    }
    for reason, call in refused.items():
        assert reason in str(routing.supports_topk(*call))
    rest = (True, 1.0)
    assert routing.supports_grouped(logits, 2, 1, 4, *rest, None) is True
    assert "equal groups" in str(routing.supports_grouped(logits, 3, 1, 2, *rest, None))
    assert "equal groups" in str(routing.supports_grouped(logits, 8, 1, 1, *rest, None))
    assert "cannot be chosen" in str(routing.supports_grouped(logits, 2, 1, 5, *rest, None))
    assert "neither 0 nor 1" in str(routing.supports_grouped(logits, 2, 1, 2, *rest, None, 2))
    bias = torch.empty(8, dtype=torch.float64)
    assert "bias has dtype" in str(routing.supports_grouped(logits, 2, 1, 2, *rest, bias))
