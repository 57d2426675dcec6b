"""Comparing results with a float64 oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_fl.testing.case import ConformanceFailure
from vllm_fl.testing.tensors import short

TELLING = 20  # elements in which two rounding orders must differ for a verdict
SHARE = 0.95  # of them must follow the stated order


@dataclass(frozen=True)
class Expected:
    """What one result should be.

    Attributes:
        value: float64, on the host.
        dtype: the result's.
        scale: what the relative tolerance is relative to: the sum of the absolute values of the
            terms where terms cancel; None for the value itself.
        slack: an absolute error allowed on top, for what fp32 arithmetic loses in any dtype.
        exact: where the result must equal the value bit by bit; None for nowhere.
    """

    value: Tensor
    dtype: torch.dtype
    scale: Tensor | None = None
    slack: Tensor | None = None
    exact: Tensor | None = None


def check_form(result: Tensor | None, expected: Expected | None, device: str, label: str) -> None:
    """Check presence, shape, dtype and device of a result.

    Raises:
        ConformanceFailure: says what differs.
    """
    if expected is None or result is None:
        if (expected is None) != (result is None):
            given, wanted = ("nothing", "a tensor") if result is None else ("a tensor", "None")
            raise ConformanceFailure(f"{label} is {given}, must be {wanted}")
        return
    for what, has, must in (
        ("shape", tuple(result.shape), tuple(expected.value.shape)),
        ("dtype", short(result.dtype), short(expected.dtype)),
        ("device", result.device.type, torch.device(device).type),
    ):
        if has != must:
            raise ConformanceFailure(f"{label} has {what} {has}, must be {must}")


def check_values(
    result: Tensor | None,
    expected: Expected | None,
    tolerances: Mapping[str, tuple[float, float]],
    label: str,
) -> None:
    """Check ``|result - value| <= atol + rtol * scale + slack`` in every element.

    Raises:
        ConformanceFailure: names the worst element.
    """
    if result is None or expected is None:
        return
    value = expected.value
    if result.shape != value.shape:
        raise ConformanceFailure(
            f"{label} has shape {tuple(result.shape)}, must be {tuple(value.shape)}"
        )
    floating = expected.dtype.is_floating_point
    rtol, atol = tolerances[short(expected.dtype)] if floating else (0.0, 0.0)
    got = result.detach().cpu().double()
    scale = value if expected.scale is None else expected.scale
    slack = 0.0 if expected.slack is None else expected.slack
    excess = (got - value).abs() - (atol + rtol * scale.abs() + slack)
    # Beyond the dtype's range the value itself becomes infinite.
    rounded = value.to(expected.dtype).double()
    excess = torch.where(rounded.isinf() & (got == rounded), 0.0, excess)
    wrong = ~(excess <= 0)
    if expected.exact is not None:
        wrong |= expected.exact & (got != rounded)
    if bool(wrong.any()):
        worst = int(torch.where(wrong, excess.nan_to_num(nan=torch.inf), -torch.inf).argmax())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), value.shape))
        raise ConformanceFailure(
            f"{label}: {int(wrong.sum())} of {value.numel()} elements are wrong; at {where} "
            f"{got.flatten()[worst].item():.9g}, must be {value.flatten()[worst].item():.9g} "
            f"(rtol {rtol:g}, atol {atol:g})"
        )


def check_equal(one: Tensor | None, other: Tensor | None, text: str) -> None:
    """Check that two results are equal bit by bit.

    Raises:
        ConformanceFailure: with ``text`` and how many elements differ.
    """
    if one is None or other is None:
        return
    differ = int((bits(one) != bits(other)).sum())
    if differ:
        raise ConformanceFailure(f"{text}: {differ} of {one.numel()} elements differ")


def bits(tensor: Tensor) -> Tensor:
    """Return the elements' bits as integers, on the host."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().cpu().contiguous().view(sizes[tensor.element_size()])


def check_rounding(result: Tensor, stated: Tensor, other: Tensor, name: str) -> None:
    """Check which of two rounding orders a result follows, where they can be told apart.

    Args:
        result: the implementation's.
        stated: emulation of the order that the operator states, rounded.
        other: emulation of another order, rounded.
        name: of the other order.

    Raises:
        ConformanceFailure: less than 95 % of the telling elements follow the stated order, or an
            element is more than two units in the last place away from it.
    """
    got, stated64 = result.detach().cpu().double(), stated.double()
    # An intermediate value next to a rounding boundary may shift a result by one unit and more.
    units = 2 * torch.finfo(stated.dtype).eps * stated64.abs().clamp_min(1e-4)
    far = int((~((got - stated64).abs() <= units)).sum())
    if far:
        raise ConformanceFailure(f"{far} elements are more than two units in the last place away")
    telling = stated != other
    count = int(telling.sum())
    if count < TELLING:
        raise ConformanceFailure(f"the case is useless: {count} elements tell the orders apart")
    follows = int((got[telling] == stated64[telling]).sum())
    if follows < SHARE * count:
        against = int((got[telling] == other.double()[telling]).sum())
        raise ConformanceFailure(
            f"of {count} elements that tell rounding orders apart, {follows} follow the stated "
            f"one and {against} follow this: {name}"
        )
