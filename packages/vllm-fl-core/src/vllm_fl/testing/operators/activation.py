"""Gated activations: ``silu_and_mul`` and ``gelu_and_mul``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from vllm_fl.testing.case import Arguments, Case
from vllm_fl.testing.checks import Inputs, TensorOperator
from vllm_fl.testing.compare import Expected
from vllm_fl.testing.tensors import FLOATS, LAYOUTS, Maker, far_rows, short

HALVES = (1, 3, 4, 12, 64, 127, 3420)  # 3, 4, 12, 3420: the second half is not 16-byte aligned
EXTREMES = (0.0, -0.0, 20.0, -20.0, 100.0, -100.0, 1e-6, -1e-6, 240.0, -240.0)


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor, approximate: str) -> Tensor:
    """Return x * Phi(x), or its approximation by tanh."""
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * torch.special.erfc(-x / math.sqrt(2))


def _oracle(act: Callable[..., Tensor], x: Tensor, **how: str) -> tuple[Expected, ...]:
    gate, up = x.double().tensor_split(2, dim=-1)
    # For negative gates 1 + erf, 1 + tanh and 1 + exp cancel in fp32.
    slack = 2.0**-21 * (gate * up).abs()
    return (Expected(act(gate, **how) * up, x.dtype, slack=slack),)


def silu_and_mul(x: Tensor) -> tuple[Expected, ...]:
    """The oracle of ``silu_and_mul``."""
    return _oracle(silu, x)


def gelu_and_mul(x: Tensor, approximate: str) -> tuple[Expected, ...]:
    """The oracle of ``gelu_and_mul``."""
    return _oracle(gelu, x, approximate=approximate)


def _normal(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, how: Arguments, maker: Maker
) -> Arguments:
    return {"x": maker.place(maker.normal(*shape), dtype, layout), **how}


def _extreme(dtype: torch.dtype, how: Arguments, maker: Maker) -> Arguments:
    gate = torch.tensor(EXTREMES)
    up = torch.tensor((1.0, -2.0))
    rows = torch.cat((gate.expand(2, -1), up[:, None].expand(-1, len(gate))), dim=1)
    return {"x": maker.place(rows, dtype), **how}


def _tail(dtype: torch.dtype, how: Arguments, maker: Maker) -> Arguments:
    """Gates where gelu and its approximation differ by 10 %, made large by the other half."""
    gate, up = maker.uniform(4, 64, low=-3.5, high=-2.5), torch.full((4, 64), 64.0)
    return {"x": maker.place(torch.cat((gate, up), dim=1), dtype), **how}


def _far(dtype: torch.dtype, how: Arguments, maker: Maker) -> Arguments:
    return {"x": far_rows(maker.normal(2, 128), dtype, maker.device), **how}


def _inputs(how: Arguments) -> Iterator[Inputs]:
    suffix = "".join(f"-{value}" for value in how.values())
    for dtype in FLOATS:
        shapes: list[tuple[tuple[int, ...], str]] = [
            ((3, 2 * half), "contiguous") for half in HALVES
        ]
        shapes += [((3, 24), layout) for layout in LAYOUTS]
        shapes += [((2, 3, 128), layout) for layout in LAYOUTS]
        shapes += [((2, 3, 5, 24), layout) for layout in ("contiguous", "wide_rows", "skewed")]
        shapes += [((64,), "contiguous"), ((64,), "offset")]
        shapes += [((0, 64), "contiguous"), ((0, 64), "wide_rows"), ((2, 0, 64), "contiguous")]
        for shape, layout in dict.fromkeys(shapes):
            name = f"{short(dtype)}-{'x'.join(map(str, shape))}-{layout}{suffix}"
            yield Inputs(name, partial(_normal, shape, dtype, layout, how))
        yield Inputs(f"{short(dtype)}-extreme{suffix}", partial(_extreme, dtype, how))
        yield Inputs(f"{short(dtype)}-tail{suffix}", partial(_tail, dtype, how))


def _operator(
    op_name: str, oracle: Callable[..., tuple[Expected, ...]], hows: list[Arguments]
) -> TensorOperator:
    # Probes and far inputs take the first way alone: what they look at does not depend on it.
    how = hows[0]
    return TensorOperator(
        op_name,
        oracle,
        inputs=[entry for each in hows for entry in _inputs(each)],
        probes=[
            Inputs(f"{short(d)}-5x1024", partial(_normal, (5, 1024), d, "wide_rows", how))
            for d in FLOATS
        ],
        far=[Inputs(f"{short(d)}-2x128", partial(_far, d, how)) for d in FLOATS[1:]],
        row_arguments=("x",),
    )


def cases() -> Iterator[Case]:
    """Yield the cases of both operators."""
    yield from _operator("silu_and_mul", silu_and_mul, [{}]).cases()
    ways: list[Arguments] = [{"approximate": "none"}, {"approximate": "tanh"}]
    yield from _operator("gelu_and_mul", gelu_and_mul, ways).cases()
