"""What the benchmark knows about an operator: inputs, right results, and who computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
Inputs = tuple[Any, ...]
Call = Callable[..., Any]

OURS = "ours"


def error_of(returned: Any, expected: Any, slack: float = 2**-6) -> tuple[float, bool]:
    """Return the relative error (norms) and whether it is acceptable for bf16, element by element.

    Three roundings of half a unit (2^-9) each are at most 2^-7 of the largest term, for which an
    element's own size and the typical one of its row stand in where terms cancel.

    Args:
        returned: the results.
        expected: the same in float64.
        slack: what an element may be off, as a part of its own and the typical size.
    """
    worst, right = 0.0, True
    for out, wanted in zip(as_results(returned), as_results(expected), strict=True):
        difference = (out.double() - wanted).abs()
        typical = wanted.square().mean(-1, keepdim=True).sqrt()
        relative = float((difference.square().mean() / wanted.square().mean()).sqrt())
        bound = slack * (wanted.abs() + typical)
        worst = max(worst, relative)
        right = right and relative < 5e-3 and bool((difference <= bound).all())
    return worst, right


def as_results(returned: Any) -> tuple[Tensor, ...]:
    """Return the results as a tuple."""
    return returned if isinstance(returned, tuple) else (returned,)


@dataclass(frozen=True)
class Sweep:
    """How an operator's tiles are compared.

    Attributes:
        tile: shape -> the tile chosen for it.
        rivals: shape -> tiles worth timing.
        launch: (arguments, tile=...) -> results.
    """

    tile: Callable[[Shape], Any]
    rivals: Callable[[Shape], Iterator[Any]]
    launch: Call


@dataclass(frozen=True)
class Operator:
    """An operator of the benchmark.

    Attributes:
        shapes: what it is timed on.
        make: (shape, device, seed) -> arguments of every candidate; the same for the same seed.
        oracle: arguments -> the results to compare with, float64 where they are rounded.
        traffic: shape -> bytes that must be moved at least.
        candidates: name -> a function that returns what computes the operator, or raises if it
            cannot be had; ``OURS`` is among them.
        flops: shape -> floating-point operations, for operators that memory does not limit.
        agree: (results, expected) -> (error, whether it is acceptable).
        in_mean: whether its ratios count in the geometric mean over all operators.
        sweep: how its tiles are compared, if it has tiles.
    """

    shapes: Sequence[Shape]
    make: Callable[[Shape, str, int], Inputs]
    oracle: Call
    traffic: Callable[[Shape], float]
    candidates: Mapping[str, Callable[[], Call]]
    flops: Callable[[Shape], float] | None = None
    agree: Callable[[Any, Any], tuple[float, bool]] = error_of
    in_mean: bool = True
    sweep: Sweep | None = None

    def expected_us(self, shape: Shape) -> float:
        """Return about how long a call takes: launch, 4 TB/s and 500 TFLOP/s."""
        flops = 0.0 if self.flops is None else self.flops(shape)
        return 1.5 + max(self.traffic(shape) / 4e6, flops / 5e8)


def random(shape: Shape, device: str, seed: int) -> Tensor:
    """Return normally distributed bf16 values."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
