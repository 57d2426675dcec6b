"""What the kit runs: a case, the implementation it is run on, and how it can end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.predicate import predicate
from vllm_fl.dispatch.spec import OpSpec
from vllm_fl.dispatch.state import device_arch
from vllm_fl.dispatch.types import YES, OpImpl

Arguments = dict[str, Any]
Notes = Mapping[str, str]


class ConformanceFailure(AssertionError):
    """The implementation does not keep the operator's contract."""


class NotApplicable(Exception):
    """A case says nothing about this implementation on this machine.

    Attributes:
        outcome: "declined" (what it declares excludes the call), "refused" (its attention class's
            ``validate_configuration`` said no) or "skipped" (something is missing here).
        reason: why.
    """

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(f"{outcome}: {reason}")
        self.outcome = outcome
        self.reason = reason


@dataclass(frozen=True)
class Subject:
    """One implementation on one device.

    Attributes:
        impl: the implementation.
        device: torch's name of the device.
    """

    impl: OpImpl
    device: str

    @property
    def spec(self) -> OpSpec:
        """The operator's entry in the catalogue."""
        return get_spec(self.impl.op_name)

    @cached_property
    def fn(self) -> Callable[..., Any]:
        """The function, its signature checked."""
        fn = self.impl.load()
        self.spec.check(fn, self.impl.impl_id)
        return fn

    def ask(self, arguments: Arguments) -> None:
        """Ask what the implementation declares about a call: architecture, dtypes, ``supports``.

        Raises:
            NotApplicable: it declined.
        """
        needed, present = self.impl.min_arch, device_arch()
        if needed is not None and (present is None or present < needed):
            reason = f"it needs architecture {needed}, this device has {present or 'none'}"
            raise NotApplicable("declined", reason)
        decide = predicate(self.impl)
        decision = decide(*arguments.values()) if decide is not None else YES
        if not decision:
            raise NotApplicable("declined", decision.reason)

    def call(self, arguments: Arguments) -> tuple[Tensor | None, ...]:
        """Call the function and wait for the device, so that an error surfaces here.

        Args:
            arguments: all of them, in the order of the operator's signature.

        Returns:
            The results, also a single one, as a tuple, then what it writes or updates.
        """
        result = self.fn(*arguments.values())
        synchronize(self.device)
        return self.results(result, arguments)

    def results(self, result: Any, arguments: Arguments) -> tuple[Tensor | None, ...]:
        """Return what a call has returned and what it has written or updated as one tuple."""
        returned = result if isinstance(result, tuple) else (result,)
        return (*returned, *self.spec.outputs(tuple(arguments.values()), {}))


@dataclass(frozen=True)
class Case:
    """One thing that must hold.

    Attributes:
        op_name: the operator.
        check: what kind of thing: "values", "contract", "rounding", ...
        name: what it is tried on.
        run: returns notes for the report, raises ConformanceFailure or NotApplicable.
    """

    op_name: str
    check: str
    name: str
    run: Callable[[Subject], Notes | None]

    @property
    def id(self) -> str:
        """The name that users see and that exclusions match."""
        return f"{self.op_name}/{self.check}/{self.name}"


def synchronize(device: str) -> None:
    """Wait until the device has finished what it was given."""
    module = getattr(torch, torch.device(device).type, None)
    if module is not None and hasattr(module, "synchronize"):
        module.synchronize()


def writable(spec: OpSpec, arguments: Arguments) -> list[Tensor]:
    """Return the arguments whose storage this call may change: donated, written and updated."""
    names = set(spec.written | spec.updated)
    if spec.donates(tuple(arguments.values()), {}):
        names |= spec.donated
    return [arguments[name] for name in names if arguments[name] is not None]
