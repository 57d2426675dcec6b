"""Tensors with the memory layouts that models have, and comparison."""

from __future__ import annotations

import math

import torch
from hypothesis import settings
from torch import Tensor

from vllm_fl.dispatch.ops import get_spec

PROPERTY = settings(deadline=None, derandomize=True, max_examples=40, database=None)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCES = get_spec("rms_norm").tolerances  # those of every operator
LAYOUTS = ("contiguous", "offset", "wide rows", "packed", "swapped")
GUARD = 7.0


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def place(values: Tensor, dtype: torch.dtype, layout: str = "contiguous") -> tuple[Tensor, Tensor]:
    """Return a tensor of these values inside a larger storage, and that storage.

    Args:
        values: what it holds.
        dtype: its dtype.
        layout: contiguous; at an offset that is no multiple of a vector; rows that are a slice of
            wider ones; a slice of a packed row with every leading dimension inside; the first two
            dimensions swapped in memory.
    """
    shape = values.shape
    lead, width = shape[:-1], shape[-1]
    if layout == "wide rows":
        base = torch.full((*lead, width + 13), GUARD, dtype=dtype)
        view = base[..., 5 : 5 + width]
    elif layout == "packed" and lead:
        each = values[0].numel() if lead[0] else 1
        base = torch.full((lead[0], 3 * each + 3), GUARD, dtype=dtype)
        view = base[:, each : 2 * each].view(shape) if values.numel() else base.new_empty(shape)
    elif layout == "swapped" and len(lead) > 1:
        base = torch.full((lead[1], lead[0], *shape[2:]), GUARD, dtype=dtype)
        view = base.transpose(0, 1)
    else:
        first = 3 if layout == "offset" else 0
        base = torch.full((first + values.numel() + 8,), GUARD, dtype=dtype)
        view = base[first : first + values.numel()].view(shape)
    view.copy_(values)
    return view, base


def others_kept(view: Tensor, base: Tensor) -> bool:
    """Whether all elements of the storage but those of the view hold GUARD."""
    marked = base.new_zeros(base.untyped_storage().nbytes() // base.itemsize)
    marked.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
    flat = base.as_strided(marked.shape, (1,), 0)
    return bool((flat[marked == 0] == GUARD).all())


def close(actual: Tensor, expected: Tensor) -> None:
    """Compare with a float64 result, in the dtype of ``actual``."""
    assert actual.shape == expected.shape
    rtol, atol = TOLERANCES[str(actual.dtype).removeprefix("torch.")]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)


def same_rounding(actual: Tensor, expected: Tensor, share: float = 0.02) -> None:
    """Compare with a reference of the same rounding order.

    In 16 bits the two may differ by a unit where a fp32 value in between falls beside a rounding
    boundary, which is rare; another order of rounding differs in 20 % of random elements.
    """
    assert actual.dtype == expected.dtype
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=5e-7)
        return
    unit = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=2 * unit, atol=1e-6)
    unequal = int((actual != expected).sum())
    assert unequal <= max(1, math.ceil(share * actual.numel()))
