"""What is fixed about an operator, and whether a function can stand in for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_fl.dispatch.errors import RegistrationError


@dataclass(frozen=True)
class OpSpec:
    """What is fixed about an operator.

    Attributes:
        name: the operator's name.
        signature: the parameters that every implementation must accept, with their defaults.
        doc: the contract in words.
        donated: parameters whose storage an implementation may overwrite.
        donated_when: the parameters are donated only in calls where this one is not None.
        written: parameters that are outputs. What they hold before a call does not matter, so
            that a call that has failed may be repeated on them.
        updated: parameters of which a call changes a part, in place. What that part held before
            does not matter, so that a call that has failed may be repeated here, too.
        tolerances: per dtype name, (rtol, atol) against a float64 oracle.
        phases: phases of the engine's steps in which implementations may differ. Only where the
            choice costs nothing a call and one compiled graph does not serve several.
    """

    name: str
    signature: inspect.Signature
    doc: str
    donated: frozenset[str] = frozenset()
    donated_when: str | None = None
    written: frozenset[str] = frozenset()
    updated: frozenset[str] = frozenset()
    tolerances: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    phases: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The first line of the documentation."""
        return self.doc.splitlines()[0]

    @property
    def declaration(self) -> str:
        """Name, parameters and result as a line of Python."""
        plain = {
            name: p.replace(annotation=inspect.Parameter.empty)
            for name, p in self.signature.parameters.items()
        }
        parts = [
            str(plain[name]).replace("=", f": {p.annotation} = ", 1)
            if p.default is not p.empty
            else f"{name}: {p.annotation}"
            for name, p in self.signature.parameters.items()
        ]
        return f"{self.name}({', '.join(parts)}) -> {self.signature.return_annotation}"

    @property
    def computes(self) -> bool:
        """Whether it takes tensors; one that does not is asked which class to use."""
        parameters = self.signature.parameters.values()
        return any("Tensor" in str(parameter.annotation) for parameter in parameters)

    def donates(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments gives up the storage of any of them."""
        if not self.donated:
            return False
        bound = self.signature.bind(*args, **kwargs).arguments
        if self.donated_when is not None and bound.get(self.donated_when) is None:
            return False
        return any(bound.get(name) is not None for name in self.donated)

    def outputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments that a call writes or updates, in the order of the signature."""
        names = self.written | self.updated
        if not names:
            return ()
        bound = self.signature.bind(*args, **kwargs).arguments
        return tuple(value for name, value in bound.items() if name in names)

    def check(self, fn: Callable[..., Any], owner: str) -> None:
        """Check that ``fn`` can be called as this operator.

        Its positional parameters must have the operator's names, in order, with the operator's
        defaults (or any default where the operator has one); more parameters need defaults.
        ``*args`` takes the place of any parameters.

        Raises:
            RegistrationError: names ``owner`` (implementation and wheel) and both signatures.
        """
        try:
            given = inspect.signature(fn)
        except (TypeError, ValueError):
            return  # a compiled builtin without a signature: only a call can tell
        problem = _mismatch(self.signature, given)
        if problem:
            raise RegistrationError(
                f"{owner} does not fit operator {self.name!r}: {problem}. "
                f"Operator: {self.declaration}; implementation: {given}."
            )


def _mismatch(spec: inspect.Signature, given: inspect.Signature) -> str:
    """Say why a function with signature ``given`` cannot stand in for ``spec``; "" if it can."""
    kinds = inspect.Parameter
    positional = [
        p for p in given.parameters.values()
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    variadic = any(p.kind is kinds.VAR_POSITIONAL for p in given.parameters.values())
    wanted = list(spec.parameters.values())
    for index, want in enumerate(wanted):
        if index >= len(positional):
            if variadic:
                break
            return f"parameter {want.name!r} is missing"
        have = positional[index]
        if have.kind is kinds.POSITIONAL_OR_KEYWORD and have.name != want.name:
            return f"parameter {index + 1} is {have.name!r}, not {want.name!r}"
        if want.default is not kinds.empty and have.default is kinds.empty:
            return f"parameter {want.name!r} has no default (the operator's is {want.default!r})"
        if want.default is not kinds.empty and have.default != want.default:
            return (
                f"parameter {want.name!r} defaults to {have.default!r}, "
                f"the operator's default is {want.default!r}"
            )
    extra = positional[len(wanted) :]
    extra += [p for p in given.parameters.values() if p.kind is kinds.KEYWORD_ONLY]
    for parameter in extra:
        if parameter.default is kinds.empty:
            return f"it requires a parameter {parameter.name!r} that the operator does not have"
    return ""
