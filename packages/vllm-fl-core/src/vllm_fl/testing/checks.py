"""The checks that every operator on plain tensors has in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_fl.dispatch.ops import get_spec
from vllm_fl.testing.case import (
    Arguments,
    Case,
    ConformanceFailure,
    NotApplicable,
    Notes,
    Subject,
    writable,
)
from vllm_fl.testing.compare import Expected, check_equal, check_form, check_values
from vllm_fl.testing.tensors import Maker

Results = tuple[Tensor | None, ...]
Oracle = Callable[..., tuple[Expected | None, ...]]


@dataclass(frozen=True)
class Inputs:
    """The arguments of a call, made afresh each time.

    Attributes:
        name: what is special about them.
        make: makes them.
    """

    name: str
    make: Callable[[Maker], Arguments]


@dataclass(frozen=True)
class TensorOperator:
    """How an operator on plain tensors is tested.

    Attributes:
        op_name: the operator.
        oracle: called with the arguments on the host; computes in float64 and must not change them;
            returns what the operator returns, then what it writes.
        inputs: every input that the operator's contract allows in kind.
        probes: a few typical ones, for the checks that take longer.
        far: inputs whose offsets need 64 bits.
        row_arguments: arguments whose dimension 0 counts tokens that are independent; none for no
            such check.
        canonical: brings results that the contract leaves an order to into the oracle's order.
    """

    op_name: str
    oracle: Oracle
    inputs: Sequence[Inputs]
    probes: Sequence[Inputs]
    far: Sequence[Inputs]
    row_arguments: tuple[str, ...] = ()
    canonical: Callable[[Results, Arguments], Results] = field(default=lambda results, _: results)

    def cases(self) -> Iterator[Case]:
        """Yield every case."""
        yield from self._cases("values", self._values, self.inputs)
        yield from self._cases("contract", self._contract, self.inputs)
        yield from self._cases("offsets", self._offsets, self.far)
        yield from self._cases("determinism", self._determinism, self.probes)
        if self.row_arguments:
            yield from self._cases("rows", self._rows, self.probes)
        yield from self._cases("compile", self._compile, self.probes)
        yield from self._cases("opcheck", self._opcheck, self.probes[:1])

    def _cases(
        self,
        check: str,
        run: Callable[[Inputs, Subject], Notes | None],
        inputs: Sequence[Inputs],
    ) -> Iterator[Case]:
        for entry in inputs:
            yield Case(self.op_name, check, entry.name, partial(run, entry))

    def _make(self, inputs: Inputs, subject: Subject) -> tuple[Maker, Arguments]:
        maker = Maker(subject.device)
        made = inputs.make(maker)
        arguments = {name: made[name] for name in subject.spec.signature.parameters}
        subject.ask(arguments)
        return maker, arguments

    def expected(self, arguments: Arguments) -> tuple[Expected | None, ...]:
        """Return what the oracle says about a call."""
        return self.oracle(**{name: _host(value) for name, value in arguments.items()})

    def call(self, subject: Subject, arguments: Arguments) -> Results:
        """Return the results in their canonical order."""
        return self.canonical(subject.call(arguments), arguments)

    def compare(self, results: Results, expected: tuple[Expected | None, ...], label: str) -> None:
        """Compare the values of all results.

        Raises:
            ConformanceFailure: one is wrong or missing.
        """
        if len(results) != len(expected):
            raise ConformanceFailure(
                f"{label}: {len(results)} results, the operator returns {len(expected)}"
            )
        tolerances = get_spec(self.op_name).tolerances
        for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            if (result is None) != (wanted is None):
                raise ConformanceFailure(f"{label}, result {index}: one of the two is None")
            check_values(result, wanted, tolerances, f"{label}, result {index}")

    def _values(self, inputs: Inputs, subject: Subject) -> None:
        for label in ("first call", "second call"):
            _, arguments = self._make(inputs, subject)
            expected = self.expected(arguments)
            self.compare(self.call(subject, arguments), expected, label)

    def _contract(self, inputs: Inputs, subject: Subject) -> None:
        maker, arguments = self._make(inputs, subject)
        expected = self.expected(arguments)
        results = subject.call(arguments)
        may_change = writable(subject.spec, arguments)
        maker.check_untouched(may_change)
        if len(results) != len(expected):
            raise ConformanceFailure(
                f"{len(results)} results, the operator returns {len(expected)}"
            )
        for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            check_form(result, wanted, subject.device, f"result {index}")
            if result is not None:
                maker.check_not_aliased(result, may_change)

    def _offsets(self, inputs: Inputs, subject: Subject) -> None:
        _, arguments = self._make(inputs, subject)
        expected = self.expected(arguments)
        self.compare(self.call(subject, arguments), expected, "rows 2^31 elements apart")

    def _determinism(self, inputs: Inputs, subject: Subject) -> None:
        first = self.call(subject, self._make(inputs, subject)[1])
        kept = [None if result is None else result.clone() for result in first]
        second = self.call(subject, self._make(inputs, subject)[1])
        for one, other in zip(kept, second, strict=True):
            check_equal(one, other, "two calls with the same arguments")

    def _rows(self, inputs: Inputs, subject: Subject) -> Notes:
        """Report whether a row alone gives the bits that it gives in a batch; not a failure."""
        _, arguments = self._make(inputs, subject)
        rows = len(arguments[self.row_arguments[0]])
        whole = [_copy(result) for result in subject.call(arguments)]
        differing = 0
        for row in range(rows):
            _, alone = self._make(inputs, subject)
            for name in self.row_arguments:
                if alone[name] is not None:
                    alone[name] = alone[name][row : row + 1]
            results = subject.call(alone)
            pairs = zip(results, whole, strict=True)
            differing += any(
                one is not None and other is not None and not torch.equal(one[0], other[row])
                for one, other in pairs
            )
        exact = "exact" if not differing else f"not exact ({differing} of {rows} rows)"
        return {"row alone equals row in batch": exact}

    def _compile(self, inputs: Inputs, subject: Subject) -> None:
        if not subject.impl.traceable:
            raise NotApplicable("skipped", "it declares itself opaque to torch.compile")
        _, arguments = self._make(inputs, subject)
        expected = self.expected(arguments)
        torch.compiler.reset()
        compiled = torch.compile(subject.fn, fullgraph=True, backend="eager")
        result = compiled(*arguments.values())
        results = self.canonical(subject.results(result, arguments), arguments)
        self.compare(results, expected, "compiled")

    def _opcheck(self, inputs: Inputs, subject: Subject) -> None:
        overload = _torch_operator(subject.fn)
        if overload is None:
            raise NotApplicable("skipped", "it is a Python function, not a torch custom operator")
        _, arguments = self._make(inputs, subject)
        torch.library.opcheck(
            overload, tuple(arguments.values()), test_utils=("test_schema", "test_faketensor")
        )


def _torch_operator(fn: Any) -> Any:
    if isinstance(fn, torch.library.CustomOpDef):
        return fn
    if isinstance(fn, torch._ops.OpOverloadPacket):
        return fn.default
    return fn if isinstance(fn, torch._ops.OpOverload) else None


def _host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.clone()
