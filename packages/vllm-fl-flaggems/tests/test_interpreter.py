"""The repaired interpreter computes with bf16 as torch does, and refuses what it cannot do."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from tensors import normal
from torch import Tensor


@triton.jit
def _arithmetic(out, less, x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a * b + a)
    tl.store(less + at, (a < b).to(tl.int32))


@triton.jit
def _convert(out, x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def _matmul(out, x, y, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@triton.jit
def _sum(out, x, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N)), axis=0))


@triton.jit
def _count(out, bounds, N: tl.constexpr):
    begin, end = tl.load(bounds), tl.load(bounds + 1)
    total = begin * 0
    for i in range(begin, end, N):
        if i != begin:  # a truth value of a tensor of one element
            total += i
    for i in tl.range(end):
        total += i
    tl.store(out, total)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(x, dtype=dtype)
    _convert[(1,)](out, x, N=len(x))
    return out


def test_arithmetic_and_comparison_of_bf16_are_torchs() -> None:
    x, y = normal(2, 512).to(torch.bfloat16).unbind()
    out, less = torch.empty_like(x), torch.empty(512, dtype=torch.int32)
    _arithmetic[(1,)](out, less, x, y, N=512)
    assert torch.equal(out, x * y + x)
    assert torch.equal(less.bool(), x < y)


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    x = normal(4096) * torch.logspace(-40, 38, 4096)
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, torch.inf, -torch.inf])
    x = torch.cat((x[:4088], halfway, torch.tensor([torch.nan, -0.0])))
    found, expected = converted(x, torch.bfloat16), x.to(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_widening_bf16_is_exact(dtype: torch.dtype) -> None:
    x = normal(256).to(torch.bfloat16)
    assert torch.equal(converted(x, dtype), x.to(dtype))


def test_matrix_products_of_bf16_are_those_of_fp32() -> None:
    x, y = normal(2, 32, 32).to(torch.bfloat16).unbind()
    out = torch.empty(32, 32)
    _matmul[(1,)](out, x, y, N=32)
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_of_a_loop_and_conditions_are_tensors(dtype: torch.dtype) -> None:
    out = torch.empty(1, dtype=dtype)
    _count[(1,)](out, torch.tensor([3, 12], dtype=dtype), N=4)
    assert out.item() == 7 + 11 + sum(range(12))


def test_a_reduction_over_bf16_is_refused() -> None:
    with pytest.raises(Exception, match=r"reduction over bf16") as caught:
        _sum[(1,)](torch.empty(1), torch.ones(16, dtype=torch.bfloat16), N=16)
    assert "convert to fp32 first" in str(caught.value)
