"""Offsets beyond 32 bits, without the memory."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from tensors import normal

from vllm_fl_flaggems.kernels.launch import row_offset
from vllm_fl_flaggems.ops import activation, norm, rotary
from vllm_fl_flaggems.ops.layout import row_layout
from vllm_fl_reference.ops import rotary as rotary_reference

FAR = (1 << 31) + 64


@triton.jit
def _store_offset(out, first, inner, outer_stride, inner_stride, N: tl.constexpr):
    row = first + tl.arange(0, N)
    tl.store(out + tl.arange(0, N), row_offset(row, inner, outer_stride, inner_stride))


@pytest.mark.parametrize(
    ("first", "inner", "outer_stride", "inner_stride"),
    [
        (61680, 1, 2 * 17408, 0),  # the first row of this width beyond 2^31 elements is 61681
        (2**31 - 8, 1, 2**31 - 1, 0),
        (10**6, 32, 6144, 128),
        (2**20, 7, 2**30, 2**28),
        (5, 3, FAR, FAR),
    ],
)
def test_row_offset(first: int, inner: int, outer_stride: int, inner_stride: int) -> None:
    out = torch.empty(4, dtype=torch.int64)
    _store_offset[(1,)](out, first, inner, outer_stride, inner_stride, N=4)
    rows = range(first, first + 4)
    assert out.tolist() == [r // inner * outer_stride + r % inner * inner_stride for r in rows]


def far_rows(rows: int, *shape: int) -> torch.Tensor:
    """Rows more than 2^31 elements apart; untouched pages of the storage take no memory."""
    each = torch.Size(shape).numel()
    base = torch.empty((rows - 1) * FAR + each, dtype=torch.float16)
    view = (
        base[:each]
        .view(shape)
        .expand(rows, *shape)
        .as_strided((rows, *shape), (FAR, *torch.empty(shape, device="meta").stride()))
    )
    view.copy_(normal(rows, *shape))
    return view


def test_activation_of_rows_far_apart() -> None:
    x = far_rows(2, 16)
    assert torch.equal(activation.silu_and_mul(x), activation.silu_and_mul(x.contiguous()))


def test_norm_of_rows_far_apart() -> None:
    x, weight = far_rows(2, 16), torch.ones(16, dtype=torch.float16)
    expected = norm.rms_norm(x.contiguous(), None, weight, 1e-5)
    assert torch.equal(norm.rms_norm(x, None, weight, 1e-5), expected)
    near = x.contiguous()
    expected = norm.rms_norm(near.clone(), near.clone(), weight, 1e-5)
    found = norm.rms_norm(x, near, weight, 1e-5)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_rotary_of_tokens_and_heads_far_apart() -> None:
    query, key = far_rows(2, 2, 8), far_rows(2, 1, 8)
    angles = torch.rand(4, 8)
    cos, sin = angles.half().chunk(2, dim=-1)
    call = (cos, sin, torch.tensor([3, 1]), True)
    expected = rotary_reference.rotary_embedding(query, key, *call)
    found = rotary.rotary_embedding(query, key, *call)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    heads = far_rows(2, 2, 8).transpose(0, 1)
    expected = rotary_reference.rotary_embedding(heads, None, *call)
    assert torch.equal(rotary.rotary_embedding(heads, None, *call)[0], expected[0])


@pytest.mark.parametrize(
    ("shape", "stride", "layout"),
    [
        ((8,), (1,), (1, 0, 0)),
        ((5, 8), (20, 1), (1, 20, 0)),
        ((5, 3, 8), (24, 8, 1), (1, 8, 0)),
        ((5, 3, 8), (100, 8, 1), (3, 100, 8)),
        ((2, 5, 3, 8), (120, 24, 8, 1), (1, 8, 0)),
        ((2, 5, 3, 8), (500, 100, 8, 1), (3, 100, 8)),
        ((2, 5, 3, 8), (999, 24, 8, 1), (15, 999, 8)),
        ((5, 1, 8), (576, 8, 1), (1, 576, 8)),
    ],
)
def test_row_layout(
    shape: tuple[int, ...], stride: tuple[int, ...], layout: tuple[int, int, int]
) -> None:
    x = torch.empty_strided(shape, stride, device="meta")
    assert row_layout(x) == layout
    inner, outer_stride, inner_stride = layout
    index = torch.arange(x.shape[:-1].numel())
    starts = torch.zeros(shape[:-1], dtype=torch.int64)
    for dim, (size, step) in enumerate(zip(shape[:-1], stride[:-1], strict=True)):
        starts += (torch.arange(size) * step).view(-1, *[1] * (len(shape) - 2 - dim))
    rows = index // inner * outer_stride + index % inner * inner_stride
    assert torch.equal(rows, starts.flatten())


def test_three_strides_are_no_layout() -> None:
    x = torch.empty_strided((2, 5, 3, 8), (999, 100, 9, 1), device="meta")
    with pytest.raises(ValueError, match="do not reduce to two"):
        row_layout(x)
