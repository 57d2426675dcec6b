"""The cases of a target as pytest parameters, and the test function for a wheel's own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest  # type: ignore[import-not-found]
import torch

from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.testing.case import Case, NotApplicable, Notes, Subject
from vllm_fl.testing.operators import all_cases
from vllm_fl.testing.target import Target, find_target


@dataclass(frozen=True)
class Item:
    """One case on one implementation.

    Attributes:
        case: the case.
        subject: the implementation and the device.
        exclusion: why it is known to fail; None if it must pass.
    """

    case: Case
    subject: Subject
    exclusion: str | None = None

    def run(self) -> Notes:
        """Run it; see :class:`~vllm_fl.testing.case.Case` for what it raises.

        Torch gets one thread: the tensors are so small that waking others takes longer.
        """
        with _one_thread():
            return self.case.run(self.subject) or {}


def items(target: Target) -> list[Item]:
    """Return everything that there is to run.

    Raises:
        ConfigError: an exclusion has no reason or matches no case.
    """
    cases = all_cases()
    pairs = [(case, impl) for impl in target.implementations for case in cases[impl.op_name]]
    exclusions = target.exclusions([case.id for case, _ in pairs])
    return [
        Item(case, Subject(impl, target.device), exclusions.get(case.id)) for case, impl in pairs
    ]


def parameters(target: Target) -> list[Any]:
    """Return the items as pytest parameters; the excluded ones must fail."""
    found = items(target)
    several = len({impl.op_name for impl in target.implementations}) < len(target.implementations)
    return [
        pytest.param(
            item,
            id=f"{item.case.id}@{item.subject.impl.impl_id}" if several else item.case.id,
            marks=[]
            if item.exclusion is None
            else [pytest.mark.xfail(reason=item.exclusion, strict=True)],
        )
        for item in found
    ]


def sample(found: list[Any], every: int) -> list[Any]:
    """Return of each check's cases each ``every``-th, starting with another one for each check.

    Args:
        found: what :func:`parameters` returns.
        every: a number that no number of dtypes or shapes has as a factor, so that all occur.

    Raises:
        ConfigError: it is less than 1.
    """
    if every < 1:
        raise ConfigError(f"each {every}-th case cannot be run: give a number from 1 on.")
    checks: dict[tuple[str, str], list[Any]] = {}
    for parameter in found:
        case = parameter.values[0].case
        checks.setdefault((case.op_name, case.check), []).append(parameter)
    return [
        parameter
        for number, cases in enumerate(checks.values())
        for parameter in cases[number % min(every, len(cases)) :: every]
    ]


def run(item: Item, record_property: Callable[[str, object], None]) -> None:
    """Run an item inside a pytest test.

    Args:
        item: what to run.
        record_property: pytest's fixture; takes the operator, the case and its notes.
    """
    record_property("operator", item.case.op_name)
    record_property("case", item.case.id)
    try:
        notes = item.run()
    except NotApplicable as reason:
        pytest.skip(str(reason))
    for key, value in notes.items():
        record_property(key, value)


def conformance_test(name: str, device: str | None = None) -> Callable[..., None]:
    """Return a test function over every case of a backend; see :mod:`vllm_fl.testing`.

    Args:
        name: a backend's name, or an implementation's id.
        device: where to run; None for the backend's own device.
    """

    def test_conformance(item: Item, record_property: Callable[[str, object], None]) -> None:
        run(item, record_property)

    parametrize = pytest.mark.parametrize("item", parameters(find_target(name, device)))
    return parametrize(test_conformance)  # type: ignore[no-any-return]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
