"""Gated activations against a float64 oracle that rounds where the docstrings say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fl_reference.ops.activation import gelu_and_mul, silu_and_mul

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Two roundings, each at most half a unit in the last place, and the oracle's own.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# torch computes gelu as x * (1 + erf(...)) / 2 in fp32: an absolute error of 1e-7 per unit of x in
# the negative tail, times the other half.
ABSOLUTE = 1e-5
LAYOUTS = ("contiguous", "offset", "wide rows", "transposed")

shapes = st.tuples(
    st.lists(st.integers(0, 5), max_size=3), st.sampled_from([1, 2, 3, 4, 5, 12, 31, 64])
)


def make(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return (3 * torch.randn(size, generator=generator)).to(dtype)

    if layout == "offset":
        count = torch.Size(shape).numel()
        return normal(count + 3)[3:].view(shape)
    if layout == "wide rows":
        return normal(*shape[:-1], shape[-1] + 7)[..., 5 : 5 + shape[-1]]
    if layout == "transposed":
        return normal(*reversed(shape)).permute(*reversed(range(len(shape))))
    return normal(*shape)


def silu64(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu64(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def gelu_tanh64(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


OPS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (silu_and_mul, silu64),
    "gelu": (gelu_and_mul, gelu64),
    "gelu tanh": (lambda x: gelu_and_mul(x, "tanh"), gelu_tanh64),
}


def oracle(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    d = x.shape[-1] // 2
    gate = activation(x[..., :d].double()).to(x.dtype)
    return (gate.double() * x[..., d:].double()).to(x.dtype)


@PROPERTY
@given(
    shapes,
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
    st.sampled_from(sorted(OPS)),
    st.integers(0, 99),
)
def test_matches_the_oracle(
    shape: tuple[list[int], int], dtype: torch.dtype, layout: str, name: str, seed: int
) -> None:
    op, activation = OPS[name]
    x = make((*shape[0], 2 * shape[1]), dtype, layout, seed)
    before = x.clone()
    out = op(x)
    assert out.shape == (*shape[0], shape[1])
    assert out.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, oracle(activation, x), rtol=tolerance, atol=ABSOLUTE)
    assert torch.equal(x, before), "the input was modified"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [1, 3, 4, 12, 3420])
def test_half_widths_that_break_vector_loads(d: int, dtype: torch.dtype) -> None:
    x = make((3, 2 * d), dtype, "contiguous", d)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(silu_and_mul(x), oracle(silu64, x), rtol=tolerance, atol=ABSOLUTE)


@pytest.mark.parametrize("name", sorted(OPS))
def test_the_activation_is_rounded_before_the_product(name: str) -> None:
    op, activation = OPS[name]
    x = make((64, 512), torch.bfloat16, "contiguous", 1).abs()
    gate, up = x.double().chunk(2, dim=-1)
    rounded_once = (activation(gate) * up).to(x.dtype)
    ours = op(x)
    assert (ours == oracle(activation, x)).double().mean() > 0.995
    assert (ours != rounded_once).double().mean() > 0.1


@pytest.mark.parametrize("name", sorted(OPS))
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8), (0,)])
def test_nothing_in_nothing_out(name: str, shape: tuple[int, ...]) -> None:
    out = OPS[name][0](torch.empty(shape))
    assert out.shape == (*shape[:-1], shape[-1] // 2)


@pytest.mark.parametrize("name", sorted(OPS))
def test_traces_without_a_graph_break(name: str) -> None:
    op = OPS[name][0]
    x = make((5, 24), torch.bfloat16, "wide rows", 2)
    assert torch.equal(torch.compile(op, fullgraph=True, backend="eager")(x), op(x))


@pytest.mark.parametrize("shape", [(), (5,), (2, 7)])
def test_odd_widths_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"silu_and_mul: the last dimension must be even"):
        silu_and_mul(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"gelu_and_mul: the last dimension must be even"):
        gelu_and_mul(torch.zeros(shape))


@pytest.mark.parametrize("approximate", ["Tanh", "", "sigmoid"])
def test_unknown_approximations_are_refused(approximate: str) -> None:
    with pytest.raises(ValueError, match=rf"'none' or 'tanh', got '{approximate}'"):
        gelu_and_mul(torch.zeros(2, 4), approximate)
