"""RMS norms against a float64 oracle that rounds where the docstrings say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fl_reference.ops.norm import gemma_rms_norm, rms_norm

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A value close to a rounding boundary may round the other way in each of two steps: two units in
# the last place for 16 bits; fp32 sums of up to a few thousand terms.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
LAYOUTS = ("contiguous", "offset", "wide rows", "transposed")
EPSILON = 1e-5


def normal(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    if layout == "offset":
        return normal(torch.Size(shape).numel() + 3, dtype=dtype, seed=seed)[3:].view(shape)
    if layout == "wide rows":
        wide = normal(*shape[:-1], shape[-1] + 7, dtype=dtype, seed=seed)
        return wide[..., 5 : 5 + shape[-1]]
    if layout == "transposed":
        flipped = normal(*reversed(shape), dtype=dtype, seed=seed)
        return flipped.permute(*reversed(range(len(shape))))
    return normal(*shape, dtype=dtype, seed=seed)


def normalised64(total: Tensor, epsilon: float) -> Tensor:
    return total / torch.sqrt((total**2).mean(dim=-1, keepdim=True) + epsilon)


def oracle(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Tensor:
    total = x.double() if residual is None else x.double() + residual.double()
    out = normalised64(total, epsilon)
    if weight is not None:
        out = (out.to(weight.dtype).double() * weight.double()).to(weight.dtype)
    return out.to(x.dtype)


def gemma_oracle(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    total = x.double() if residual is None else x.double() + residual.double()
    return (normalised64(total, epsilon) * (1 + weight.double())).to(x.dtype)


def check(out: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * 1e-2)


@PROPERTY
@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([1, 2, 3, 7, 64, 129, 1000]),
    st.sampled_from(DTYPES),
    st.sampled_from([None, "same", torch.float32]),
    st.booleans(),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.integers(0, 99),
)
def test_rms_norm_matches_the_oracle(
    leading: list[int],
    hidden: int,
    dtype: torch.dtype,
    weight_dtype: str | torch.dtype | None,
    with_residual: bool,
    layout: str,
    residual_layout: str,
    seed: int,
) -> None:
    shape = (*leading, hidden)
    x = make(shape, dtype, layout, seed)
    residual = make(shape, dtype, residual_layout, seed + 1) if with_residual else None
    weight = None
    if weight_dtype is not None:
        weight = normal(hidden, dtype=dtype if weight_dtype == "same" else torch.float32, seed=7)
    before = x.clone(), None if residual is None else residual.clone()
    result = rms_norm(x, residual, weight, EPSILON)
    if residual is None:
        out = result
    else:
        out, new_residual = result
        assert new_residual.dtype == dtype
        assert torch.equal(new_residual, (x.double() + residual.double()).to(dtype))
        assert torch.equal(residual, before[1]), "the residual was modified"
    assert out.shape == shape
    assert out.dtype == dtype
    check(out, oracle(x, residual, weight, EPSILON))
    assert torch.equal(x, before[0]), "the input was modified"


@PROPERTY
@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([1, 3, 64, 129]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from(LAYOUTS),
    st.integers(0, 99),
)
def test_gemma_rms_norm_matches_the_oracle(
    leading: list[int],
    hidden: int,
    dtype: torch.dtype,
    with_residual: bool,
    layout: str,
    seed: int,
) -> None:
    shape = (*leading, hidden)
    x = make(shape, dtype, layout, seed)
    residual = make(shape, dtype, "contiguous", seed + 1) if with_residual else None
    weight = normal(hidden, dtype=dtype, seed=seed + 2)
    result = gemma_rms_norm(x, residual, weight, EPSILON)
    if residual is None:
        out = result
    else:
        out, new_residual = result
        assert torch.equal(new_residual, (x.double() + residual.double()).to(dtype))
    assert out.dtype == dtype
    check(out, gemma_oracle(x, residual, weight, EPSILON))


def test_the_normalised_value_is_rounded_before_the_weight() -> None:
    x, weight = normal(64, 512, dtype=torch.bfloat16), normal(512, dtype=torch.bfloat16, seed=1)
    out = rms_norm(x, None, weight, EPSILON)
    once = (normalised64(x.double(), EPSILON) * weight.double()).to(torch.bfloat16)
    assert (out == oracle(x, None, weight, EPSILON)).double().mean() > 0.99
    assert (out != once).double().mean() > 0.1


def test_a_fp32_weight_keeps_fp32_until_the_end() -> None:
    x, weight = normal(64, 512, dtype=torch.bfloat16), normal(512, seed=1)
    out = rms_norm(x, None, weight, EPSILON)
    once = (normalised64(x.double(), EPSILON) * weight.double()).to(torch.bfloat16)
    assert (out == once).double().mean() > 0.99


def test_the_unrounded_sum_is_normalised() -> None:
    x, residual = normal(64, 512, dtype=torch.bfloat16), normal(64, 512, seed=1).bfloat16()
    out, new_residual = rms_norm(x, residual, None, EPSILON)
    from_rounded = normalised64(new_residual.double(), EPSILON).to(torch.bfloat16)
    assert (out == oracle(x, residual, None, EPSILON)).double().mean() > 0.99
    assert (out != from_rounded).double().mean() > 0.05


def test_the_residual_keeps_its_own_dtype() -> None:
    x, residual = normal(3, 8, dtype=torch.bfloat16), normal(3, 8, seed=1)
    out, new_residual = rms_norm(x, residual, None, EPSILON)
    assert out.dtype == torch.bfloat16
    assert torch.equal(new_residual, x.float() + residual)


def test_gemma_adds_one_in_fp32() -> None:
    weight = torch.full((4,), 15.8125, dtype=torch.bfloat16)
    x = torch.ones(1, 4, dtype=torch.float32)
    # 16.8125 is not a bf16 number: a bf16 sum would give 16.75.
    torch.testing.assert_close(gemma_rms_norm(x, None, weight, 0.0), torch.full((1, 4), 16.8125))


def test_gemma_is_not_the_plain_norm() -> None:
    x, weight = normal(4, 16), normal(16, seed=1)
    with pytest.raises(AssertionError):
        check(rms_norm(x, None, weight, EPSILON), gemma_oracle(x, None, weight, EPSILON))


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_slice_of_a_packed_qkv(dtype: torch.dtype) -> None:
    qkv = normal(3, 320, dtype=dtype)
    query = qkv.split([128, 96, 96], dim=-1)[0].view(3, 2, 64)
    weight = normal(64, dtype=dtype, seed=1)
    check(rms_norm(query, None, weight, EPSILON), oracle(query, None, weight, EPSILON))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_three_and_four_with_unrelated_strides(dtype: torch.dtype) -> None:
    base = normal(7, 5, 6, 40, dtype=dtype)
    weight = normal(32, dtype=dtype, seed=1)
    for x in (base[::2, 1:3, :, 4:36], base[1, ::2, ::3, :32]):
        check(rms_norm(x, None, weight, EPSILON), oracle(x, None, weight, EPSILON))


@pytest.mark.parametrize("value", [31.0, 32.0, 256.0, 60000.0])
def test_fp16_squares_do_not_overflow(value: float) -> None:
    x = torch.full((2, 64), value, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, None, None, 0.0), torch.ones_like(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 512, 1000])
def test_a_row_does_not_depend_on_its_batch(hidden: int, dtype: torch.dtype) -> None:
    x, weight = normal(33, hidden, dtype=dtype), normal(hidden, dtype=dtype, seed=1)
    batch = rms_norm(x, None, weight, EPSILON)
    for row in (0, 16, 32):
        assert torch.equal(rms_norm(x[row], None, weight, EPSILON), batch[row])


@pytest.mark.parametrize("shape", [(0, 7168), (2, 0, 8), (3, 0)])
def test_nothing_in_nothing_out(shape: tuple[int, ...]) -> None:
    x, weight = torch.empty(shape), torch.empty(shape[-1])
    assert rms_norm(x, None, weight, EPSILON).shape == shape
    out, residual = gemma_rms_norm(x, x, weight, EPSILON)
    assert out.shape == residual.shape == shape


def test_traces_without_a_graph_break() -> None:
    x, residual, weight = normal(5, 24), normal(5, 24, seed=1), normal(24, seed=2)
    for op in (rms_norm, gemma_rms_norm):
        compiled = torch.compile(op, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x, None, weight, EPSILON), op(x, None, weight, EPSILON))
        for ours, plain in zip(
            compiled(x, residual, weight, EPSILON), op(x, residual, weight, EPSILON), strict=True
        ):
            assert torch.equal(ours, plain)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(3, 8)
    for op, name in ((rms_norm, "rms_norm"), (gemma_rms_norm, "gemma_rms_norm")):
        with pytest.raises(ValueError, match=rf"{name}: x must have at least one dimension"):
            op(torch.zeros(()), None, torch.ones(1), EPSILON)
        with pytest.raises(ValueError, match=rf"{name}: weight must have shape \(8,\), got \(1,\)"):
            op(x, None, torch.ones(1), EPSILON)
        with pytest.raises(ValueError, match=rf"{name}: residual .* \(3, 8\), got \(1, 8\)"):
            op(x, torch.zeros(1, 8), torch.ones(8), EPSILON)
