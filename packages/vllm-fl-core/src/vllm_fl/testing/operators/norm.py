"""Root-mean-square norms: ``rms_norm`` and ``gemma_rms_norm``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from vllm_fl.testing.case import Arguments, Case, Subject
from vllm_fl.testing.checks import Inputs, TensorOperator
from vllm_fl.testing.compare import Expected, check_rounding
from vllm_fl.testing.tensors import FLOATS, LAYOUTS, Maker, far_rows, short

EPSILON = 1e-5
HIDDEN = (1, 3, 8, 64, 127, 512, 2048, 7168)
# Constant rows of 64: in fp16 the sum of squares overflows from 32 on, one square from 256 on.
LARGE = {
    "float16": (32.0, 256.0, 30000.0),
    "bfloat16": (32.0, 3e4, 1e15),
    "float32": (32.0, 3e4, 1e15),
}


def normalised(x: Tensor, epsilon: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + epsilon)`` in float64."""
    wide = x.double()
    mean = (wide * wide).sum(dim=-1, keepdim=True) / x.shape[-1]
    return wide / torch.sqrt(mean + epsilon)


def _oracle(
    scale: Tensor, x: Tensor, residual: Tensor | None, epsilon: float
) -> tuple[Expected, ...]:
    if residual is None:
        return (Expected(normalised(x, epsilon) * scale, x.dtype),)
    total = x.double() + residual.double()
    # Whether the sum is normalised as it is or as it is returned is left open.
    return (
        Expected(normalised(total, epsilon) * scale, x.dtype),
        Expected(total, residual.dtype),
    )


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Expected, ...]:
    """The oracle of ``rms_norm``."""
    return _oracle(weight.double(), x, residual, epsilon)


def gemma_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Expected, ...]:
    """The oracle of ``gemma_rms_norm``."""
    return _oracle(1 + weight.double(), x, residual, epsilon)


def _arguments(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float = EPSILON
) -> Arguments:
    return {"x": x, "residual": residual, "weight": weight, "epsilon": epsilon}


def _normal(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layouts: tuple[str, str | None],
    maker: Maker,
) -> Arguments:
    x = maker.place(maker.normal(*shape), dtype, layouts[0])
    residual = None
    if layouts[1] is not None:
        residual = maker.place(maker.normal(*shape), dtype, layouts[1])
    weight = maker.place(1 + 0.5 * maker.normal(shape[-1]), dtype)
    return _arguments(x, residual, weight)


def _packed_heads(dtype: torch.dtype, maker: Maker) -> Arguments:
    """Query heads as a model cuts them out of a packed projection: 3 tokens, 2 of 5 heads of 64."""
    packed = maker.place(maker.normal(3, 320), dtype)
    query = packed.split([128, 64, 128], dim=-1)[0].view(3, 2, 64)
    return _arguments(query, None, maker.place(1 + 0.5 * maker.normal(64), dtype))


def _constant(dtype: torch.dtype, value: float, residual: bool, maker: Maker) -> Arguments:
    signs = torch.where(maker.normal(3, 64) > 0, 1.0, -1.0)
    half = maker.place(signs * value / 2, dtype) if residual else None
    x = maker.place(signs * (value / 2 if residual else value), dtype)
    return _arguments(x, half, maker.place(1 + 0.5 * maker.normal(64), dtype))


def _small(dtype: torch.dtype, epsilon: float, maker: Maker) -> Arguments:
    """Rows whose mean square is about epsilon, and a row of zeros."""
    rows = maker.normal(4, 128, scale=epsilon**0.5)
    rows[2] = 0
    weight = maker.place(1 + 0.5 * maker.normal(128), dtype)
    return _arguments(maker.place(rows, dtype), None, weight, epsilon)


def _far(dtype: torch.dtype, maker: Maker) -> Arguments:
    x = far_rows(maker.normal(2, 128), dtype, maker.device)
    return _arguments(x, None, maker.place(1 + 0.5 * maker.normal(128), dtype))


def _inputs() -> Iterator[Inputs]:
    layouts = tuple(LAYOUTS)
    for dtype in FLOATS:
        pairs: list[tuple[tuple[int, ...], tuple[str, str | None]]] = []
        for residual in (None, "contiguous"):
            pairs += [((3, n), ("contiguous", residual)) for n in HIDDEN]
            pairs += [((64,), ("offset", residual)), ((2, 2, 3, 8), ("wide_rows", residual))]
            pairs += [((2, 0, 64), ("contiguous", residual)), ((0, 64), ("wide_rows", residual))]
        for index, layout in enumerate(layouts):
            other = layouts[(index + 3) % len(layouts)]
            for residual in (None, layout, other):
                pairs += [((3, 24), (layout, residual)), ((3, 2, 64), (layout, residual))]
        for shape, both in dict.fromkeys(pairs):
            name = f"{short(dtype)}-{'x'.join(map(str, shape))}-{both[0]}"
            name += "" if both[1] is None else f"-residual_{both[1]}"
            yield Inputs(name, partial(_normal, shape, dtype, both))
        yield Inputs(f"{short(dtype)}-packed_heads", partial(_packed_heads, dtype))
        for value in LARGE[short(dtype)]:
            for with_residual in (False, True):
                name = f"{short(dtype)}-large_{value:g}{'-residual' if with_residual else ''}"
                yield Inputs(name, partial(_constant, dtype, value, with_residual))
        for epsilon in (1e-6, 1e-2):
            name = f"{short(dtype)}-small_epsilon_{epsilon:g}"
            yield Inputs(name, partial(_small, dtype, epsilon))


def _tensor_operator(op_name: str) -> TensorOperator:
    return TensorOperator(
        op_name,
        rms_norm if op_name == "rms_norm" else gemma_rms_norm,
        inputs=list(_inputs()),
        probes=[
            Inputs(
                f"{short(dtype)}-5x4096{'' if residual is None else '-residual'}",
                partial(_normal, (5, 4096), dtype, ("contiguous", residual)),
            )
            for dtype in FLOATS
            for residual in (None, "contiguous")
        ],
        far=[Inputs(f"{short(dtype)}-2x128", partial(_far, dtype)) for dtype in FLOATS[1:]],
        row_arguments=("x", "residual"),
    )


def _rounding_arguments(dtype: torch.dtype, subject: Subject) -> Arguments:
    """Weights such as 15.8125, to which 1 cannot be added without rounding."""
    maker = Maker(subject.device)
    weight = maker.place(8 + 8 * maker.uniform(1024, low=0.0, high=1.0), dtype)
    arguments = _arguments(maker.place(maker.normal(8, 1024), dtype), None, weight)
    subject.ask(arguments)
    return arguments


def _rms_rounding(dtype: torch.dtype, subject: Subject) -> None:
    arguments = _rounding_arguments(dtype, subject)
    unit = normalised(arguments["x"].cpu(), EPSILON)
    weight = arguments["weight"].cpu().double()
    stated = (unit.to(dtype).double() * weight).to(dtype)
    (result,) = subject.call(arguments)
    assert result is not None
    other = (unit * weight).to(dtype)
    check_rounding(result, stated, other, "product with the weight in fp32, rounded once")


def _gemma_rounding(dtype: torch.dtype, other: str, subject: Subject) -> None:
    arguments = _rounding_arguments(dtype, subject)
    unit = normalised(arguments["x"].cpu(), EPSILON)
    weight = arguments["weight"].cpu()
    stated = (unit * (1 + weight.double())).to(dtype)
    (result,) = subject.call(arguments)
    assert result is not None
    if other == "sum_in_16_bits":
        wrong = unit * (1 + weight).double()
    else:
        wrong = unit.to(dtype).double() * (1 + weight.double())
    check_rounding(result, stated, wrong.to(dtype), other)


def cases() -> Iterator[Case]:
    """Yield the cases of both operators."""
    for op_name in ("rms_norm", "gemma_rms_norm"):
        yield from _tensor_operator(op_name).cases()
    for dtype in FLOATS[1:]:
        name = short(dtype)
        yield Case("rms_norm", "rounding", f"{name}-before_weight", partial(_rms_rounding, dtype))
        for other in ("sum_in_16_bits", "normalised_rounded_first"):
            run = partial(_gemma_rounding, dtype, other)
            yield Case("gemma_rms_norm", "rounding", f"{name}-not_{other}", run)
