"""rms_norm and gemma_rms_norm against the reference and float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensors import (
    DTYPES,
    LAYOUTS,
    PROPERTY,
    close,
    normal,
    others_kept,
    place,
    same_rounding,
)
from torch import Tensor

from vllm_fl_flaggems.ops import norm
from vllm_fl_reference.ops import norm as reference

NAMES = ("rms_norm", "gemma_rms_norm")
EPSILON = 1e-5


def oracle(name: str, total: Tensor, weight: Tensor) -> Tensor:
    total = total.double()
    scale = weight.double() + (name == "gemma_rms_norm")
    return total / torch.sqrt((total**2).mean(-1, keepdim=True) + EPSILON) * scale


def weights(n: int, dtype: torch.dtype) -> Tensor:
    return (1 + 0.5 * normal(n, seed=5)).to(dtype)


@PROPERTY
@given(
    st.sampled_from(NAMES),
    st.lists(st.integers(1, 3), max_size=2),
    st.sampled_from([1, 2, 7, 64, 100]),
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
)
def test_without_a_residual(
    name: str, leading: list[int], n: int, dtype: torch.dtype, layout: str
) -> None:
    x, base = place(normal(*leading, n, seed=n), dtype, layout)
    weight, before = weights(n, dtype), base.clone()
    out = getattr(norm, name)(x, None, weight, EPSILON)
    assert out.is_contiguous()
    close(out, oracle(name, x, weight))
    same_rounding(out, getattr(reference, name)(x, None, weight, EPSILON), share=0.05)
    assert torch.equal(base, before)


@PROPERTY
@given(
    st.sampled_from(NAMES),
    st.lists(st.integers(1, 3), max_size=2),
    st.sampled_from([1, 7, 64, 100]),
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
)
def test_with_a_residual(
    name: str, leading: list[int], n: int, dtype: torch.dtype, layout: str, other: str
) -> None:
    shape = (*leading, n)
    x, x_base = place(normal(*shape, seed=n), dtype, layout)
    residual, residual_base = place(normal(*shape, seed=n + 1), dtype, other)
    weight, before = weights(n, dtype), (x_base.clone(), residual_base.clone())
    expected = getattr(reference, name)(x, residual, weight, EPSILON)
    exact = oracle(name, x.double() + residual.double(), weight)
    out, total = getattr(norm, name)(x, residual, weight, EPSILON)
    close(out, exact)
    same_rounding(out, expected[0], share=0.05)
    assert torch.equal(total, expected[1])
    if name == "gemma_rms_norm":
        assert torch.equal(x_base, before[0])
        assert torch.equal(residual_base, before[1])
    else:
        assert others_kept(x, x_base)
        assert others_kept(residual, residual_base)


@pytest.mark.parametrize("layout", ["contiguous", "wide rows", "packed"])
def test_donated_arguments_are_overwritten(layout: str) -> None:
    x, _ = place(normal(3, 2, 16), torch.float16, layout)
    residual, _ = place(normal(3, 2, 16), torch.float16)
    out, total = norm.rms_norm(x, residual, weights(16, torch.float16), EPSILON)
    assert out is x
    assert total is residual


def test_overlapping_rows_are_not_written_in_place() -> None:
    row = normal(1, 16)
    x, residual = row.expand(3, 16), normal(3, 16)
    expected = reference.rms_norm(x, residual, weights(16, torch.float32), EPSILON)
    before = row.clone()
    found = norm.rms_norm(x, residual, weights(16, torch.float32), EPSILON)
    for one, other in zip(found, expected, strict=True):
        same_rounding(one, other)
    assert torch.equal(row, before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [127, 2048, 4100, 8192])
def test_long_rows(name: str, n: int) -> None:
    x, residual = normal(2, 2, n).to(torch.bfloat16).unbind()
    weight = weights(n, torch.bfloat16)
    expected = getattr(reference, name)(x, residual, weight, EPSILON)
    same_rounding(
        getattr(norm, name)(x, None, weight, EPSILON),
        getattr(reference, name)(x, None, weight, EPSILON),
    )
    out, total = getattr(norm, name)(x.clone(), residual.clone(), weight, EPSILON)
    same_rounding(out, expected[0])
    assert torch.equal(total, expected[1])


def test_heads_of_a_packed_projection() -> None:
    packed = normal(3, 320).to(torch.bfloat16)
    query = packed.split([128, 64, 128], dim=-1)[0].view(3, 2, 64)
    weight = weights(64, torch.bfloat16)
    same_rounding(
        norm.rms_norm(query, None, weight, EPSILON),
        reference.rms_norm(query, None, weight, EPSILON),
    )


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_fp32_weight_stays_fp32(name: str, residual: bool) -> None:
    x = normal(2, 200).to(torch.bfloat16)
    added = normal(2, 200, seed=3).to(torch.bfloat16) if residual else None
    weight = weights(200, torch.float32)
    expected = getattr(reference, name)(x, added, weight, EPSILON)
    found = getattr(norm, name)(x.clone(), added, weight, EPSILON)
    if residual:
        found, expected = found[0], expected[0]
    same_rounding(found, expected)


def test_gemma_adds_one_in_fp32() -> None:
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    weight = torch.full((4,), 15.8125, dtype=torch.bfloat16)  # 16.8125 needs more than 8 bits
    out = norm.gemma_rms_norm(x * 4, None, weight, 0.0)
    assert torch.equal(out, torch.full((1, 4), 16.8125).to(torch.bfloat16))


@pytest.mark.parametrize("value", [32.0, 256.0, 30000.0])
def test_squares_do_not_overflow_in_fp16(value: float) -> None:
    x = torch.full((2, 64), value, dtype=torch.float16)
    assert torch.equal(
        norm.rms_norm(x, None, torch.ones(64, dtype=torch.float16), EPSILON),
        torch.ones(2, 64, dtype=torch.float16),
    )


def test_a_row_alone_gives_the_bits_it_gives_in_a_batch() -> None:
    x, residual = normal(2, 19, 100).to(torch.bfloat16).unbind()
    weight = weights(100, torch.bfloat16)
    whole = norm.rms_norm(x.clone(), residual.clone(), weight, EPSILON)[0]
    rows = [
        norm.rms_norm(x[i : i + 1].clone(), residual[i : i + 1].clone(), weight, EPSILON)[0]
        for i in range(19)
    ]
    assert torch.equal(whole, torch.cat(rows))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    x, weight = torch.empty(shape), torch.ones(8)
    assert norm.rms_norm(x, None, weight, EPSILON).shape == shape
    out, total = norm.gemma_rms_norm(x, torch.empty(shape), weight, EPSILON)
    assert out.shape == total.shape == shape


def test_what_is_declined_has_a_reason() -> None:
    x, weight = torch.empty(2, 8), torch.empty(8)
    assert norm.supports(x, None, weight, EPSILON) is True
    assert norm.supports(x, torch.empty(2, 8), weight, EPSILON) is True
    refused = {
        "not contiguous": (torch.empty(8, 2).t(), None, weight),
        "between 1 and": (torch.empty(1, 40000), None, torch.empty(40000)),
        "vector of 8": (x, None, torch.empty(4)),
        "weight has dtype": (x, None, weight.double()),
        "another shape or dtype": (x, x.half(), weight),
        "residual: the last dimension": (x, torch.empty(8, 2).t(), weight),
    }
    for reason, arguments in refused.items():
        assert reason in str(norm.supports(*arguments, EPSILON))
