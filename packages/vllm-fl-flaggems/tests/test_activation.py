"""silu_and_mul and gelu_and_mul against the reference and float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensors import DTYPES, LAYOUTS, PROPERTY, close, normal, place, same_rounding
from torch import Tensor
from torch.nn import functional

from vllm_fl_flaggems.ops import activation
from vllm_fl_reference.ops import activation as reference

KINDS = ("silu", "none", "tanh")


def run(module: object, kind: str, x: Tensor) -> Tensor:
    if kind == "silu":
        return module.silu_and_mul(x)
    return module.gelu_and_mul(x, kind)


def oracle(kind: str, x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    active = functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate=kind)
    return active * up


@PROPERTY
@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.sampled_from([1, 3, 4, 8, 12, 130]),
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
    st.sampled_from(KINDS),
)
def test_matches_the_reference(
    leading: list[int], d: int, dtype: torch.dtype, layout: str, kind: str
) -> None:
    x, base = place(normal(*leading, 2 * d, seed=d) * 3, dtype, layout)
    before = base.clone()
    out = run(activation, kind, x)
    assert out.is_contiguous()
    close(out, oracle(kind, x))
    same_rounding(out, run(reference, kind, x), share=0.05)
    assert torch.equal(base, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "d"), [(2, 3420), (3, 1100), (70, 2048)])
def test_rows_longer_than_a_tile(kind: str, rows: int, d: int) -> None:
    x = normal(rows, 2 * d).to(torch.bfloat16)
    same_rounding(run(activation, kind, x), run(reference, kind, x))


@pytest.mark.parametrize("kind", KINDS)
def test_extremes(kind: str) -> None:
    gate = torch.tensor([0.0, -0.0, 30.0, -30.0, 100.0, -100.0, 3e4, -3e4])
    x = torch.cat((gate, torch.full((8,), 2.0))).view(1, 16)
    close(run(activation, kind, x), oracle(kind, x))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 3, 2)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    out = activation.silu_and_mul(torch.empty(shape))
    assert out.shape == (*shape[:-1], shape[-1] // 2)


def test_four_dimensions() -> None:
    x, _ = place(normal(2, 3, 2, 16), torch.float16, "wide rows")
    same_rounding(activation.silu_and_mul(x), reference.silu_and_mul(x))


def test_what_is_declined_has_a_reason() -> None:
    assert activation.supports_silu(torch.empty(2, 8)) is True
    assert activation.supports_gelu(torch.empty(2, 8), "tanh") is True
    refused = {
        "not contiguous": torch.empty(8, 2).t(),
        "two halves": torch.empty(2, 7),
        "no dimension": torch.empty(()),
        "two strides": torch.empty(2, 9, 9, 9)[:, :2, :2, :8],
    }
    for reason, x in refused.items():
        assert reason in str(activation.supports_silu(x))
    assert "neither" in str(activation.supports_gelu(torch.empty(2, 8), "fast"))
