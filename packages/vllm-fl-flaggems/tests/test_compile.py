"""torch.compile: the formulas in one graph, no argument changed, no guard on the token count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensors import DTYPES, normal, same_rounding
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from vllm_fl_flaggems.ops import activation, norm, rotary

EPSILON = 1e-5
WEIGHT = torch.linspace(0.5, 1.5, 16)


def rotary_arguments(tokens: int, with_key: bool) -> tuple[object, ...]:
    packed = normal(tokens, 8 * 16)
    query = packed[:, : 5 * 16].view(tokens, 5, 16)
    key = packed[:, 5 * 16 : 6 * 16].view(tokens, 1, 16) if with_key else None
    cos, sin = torch.rand(32, 12, generator=torch.Generator().manual_seed(1)).chunk(2, dim=-1)
    return query, key, cos, sin, torch.arange(tokens) % 32, True


CALLS: dict[str, tuple[Callable[..., object], Callable[[int], tuple[object, ...]]]] = {
    "silu": (activation.silu_and_mul, lambda t: (normal(t, 16),)),
    "gelu": (activation.gelu_and_mul, lambda t: (normal(t, 16), "tanh")),
    "norm": (norm.rms_norm, lambda t: (normal(t, 16), None, WEIGHT, EPSILON)),
    "add norm": (
        norm.rms_norm,
        lambda t: (normal(t, 16), normal(t, 16, seed=1), WEIGHT, EPSILON),
    ),
    "gemma": (norm.gemma_rms_norm, lambda t: (normal(t, 16), None, WEIGHT, EPSILON)),
    "add gemma": (
        norm.gemma_rms_norm,
        lambda t: (normal(t, 16), normal(t, 16, seed=1), WEIGHT, EPSILON),
    ),
    "rotary": (rotary.rotary_embedding, lambda t: rotary_arguments(t, True)),
    "rotary without key": (rotary.rotary_embedding, lambda t: rotary_arguments(t, False)),
}
PREDICATES = {
    activation.silu_and_mul: activation.supports_silu,
    activation.gelu_and_mul: activation.supports_gelu,
    norm.rms_norm: norm.supports,
    norm.gemma_rms_norm: norm.supports,
    rotary.rotary_embedding: rotary.supports,
}


def results(returned: object) -> list[Tensor]:
    values = returned if isinstance(returned, tuple) else (returned,)
    return [value for value in values if value is not None]


def equal(found: object, expected: object) -> None:
    for one, other in zip(results(found), results(expected), strict=True):
        same_rounding(one, other)


def in_dtype(arguments: tuple[object, ...], dtype: torch.dtype) -> list[object]:
    return [
        a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_one_graph_of_the_same_values_for_every_number_of_tokens(
    name: str, dtype: torch.dtype
) -> None:
    function, make = CALLS[name]

    def guarded(*args: object) -> object:
        # What dispatch does before a call.
        if PREDICATES[function](*args) is not True:
            raise NotImplementedError
        return function(*args)

    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(guarded, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (4, 700, 3):
        arguments = in_dtype(make(tokens), dtype)
        before = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        found = compiled(*arguments)
        for now, then in zip(arguments, before, strict=True):
            assert not isinstance(now, Tensor) or torch.equal(now, then)
        equal(found, function(*arguments))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, inside Inductor
def test_inductor_compiles_a_layer_of_them() -> None:
    cos, sin = torch.rand(32, 16, generator=torch.Generator().manual_seed(1)).chunk(2, dim=-1)
    weight = torch.linspace(0.5, 1.5, 32)

    def layer(x: Tensor, residual: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = norm.rms_norm(x + 1, residual * 2, weight, EPSILON)
        packed = torch.cat((x, x * 2, x), dim=-1)
        query, key = packed[:, :64].view(-1, 4, 16), packed[:, 64:].view(-1, 2, 16)
        query, key = rotary.rotary_embedding(query, key, cos, sin, positions, True)
        return activation.silu_and_mul(query.reshape(-1, 64)) + key.reshape(-1, 32), residual

    x, residual = normal(6, 32), normal(6, 32, seed=2)
    expected = layer(x.clone(), residual.clone(), torch.arange(6))
    torch.compiler.reset()
    found = torch.compile(layer, fullgraph=True)(x, residual, torch.arange(6))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
