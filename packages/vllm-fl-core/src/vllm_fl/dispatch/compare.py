"""VLLM_FL_COMPARE: an operator's implementation beside another one on the live inputs, by layer.

A manager that has a :class:`Comparison` hands it the function of each handle; the layer then calls
what :meth:`Comparison.of_layer` returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_fl.dispatch import env
from vllm_fl.dispatch.calls import Function
from vllm_fl.dispatch.errors import ConfigError, UnknownOperatorError, VllmFLError
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.policy import Ranking, SelectionPolicy, check_token
from vllm_fl.dispatch.predicate import Predicate, decision_about, predicate
from vllm_fl.dispatch.types import OpImpl


class ComparisonError(VllmFLError, ArithmeticError):
    """A result differs from the yardstick's by more than the limit, or cannot be compared."""


@dataclass
class Difference:
    """The largest differences seen in one layer.

    Attributes:
        op_name: the operator.
        number: the layer's number among the operator's, in order of building.
        calls: how many calls were compared.
        absolute: largest absolute difference of two elements; infinite where one is NaN.
        relative: largest ratio of a call's largest difference to the yardstick's largest element.
    """

    op_name: str
    number: int
    calls: int = 0
    absolute: float = 0.0
    relative: float = 0.0


class Comparison:
    """What is compared, and what was found.

    Args:
        yardsticks: operator -> order token of the implementation to compare with.
        limit: the relative difference above which the call raises; None for no limit.

    Attributes:
        differences: (operator, layer number) -> the largest differences.
        own: operator -> the implementation that runs and is the yardstick as well.

    Raises:
        ConfigError: a token does not exist, or an operator has nothing to compare or updates its
            arguments, which are too large to copy.
        UnknownOperatorError: an operator does not exist.
    """

    def __init__(self, yardsticks: Mapping[str, str], limit: float | None) -> None:
        for op_name, token in yardsticks.items():
            check_token(token)
            if not get_spec(op_name).computes:
                raise ConfigError(
                    f"{op_name} cannot be compared: it chooses a class and computes nothing. Leave "
                    "it out."
                )
            updated = ", ".join(sorted(get_spec(op_name).updated))
            if updated:
                raise ConfigError(
                    f"{op_name} cannot be compared: it updates {updated} in place, and a copy "
                    f"would take as much memory again. Leave it out."
                )
        self.yardsticks = yardsticks
        self.limit = limit
        self.differences: dict[tuple[str, int], Difference] = {}
        self.own: dict[str, str] = {}

    @classmethod
    def from_environment(cls) -> Comparison | None:
        """Return what VLLM_FL_COMPARE asks for; None if it asks for nothing.

        Raises:
            ConfigError: the variables hold something that is not allowed.
        """
        yardsticks, limit = env.COMPARE.read(), env.COMPARE_LIMIT.read()
        if not yardsticks:
            return None
        try:
            return cls(yardsticks, limit)
        except (ConfigError, UnknownOperatorError) as error:
            raise ConfigError(f"{env.COMPARE.name}: {error}") from error

    def of_layer(
        self,
        impl: OpImpl,
        fn: Function,
        number: int,
        policy: SelectionPolicy,
        rank: Callable[[str, SelectionPolicy], Ranking],
    ) -> Function:
        """Return what a layer calls: ``fn`` compared, or ``fn`` itself if nothing is to be.

        Args:
            impl: the layer's first choice.
            fn: what runs it.
            number: the layer's number among the operator's.
            policy: the layer's policy, to which the yardstick's order is added.
            rank: ranks the operator's implementations under a policy.

        Raises:
            ConfigError: there is nothing to compare with.
        """
        token = self.yardsticks.get(impl.op_name)
        if token is None:
            return fn
        try:
            policy = replace(policy, per_op_order=((impl.op_name, (token,)),))
            other = rank(impl.op_name, policy).require()[0]
            yardstick, takes = other.load(), predicate(other)
        except VllmFLError as error:
            raise ConfigError(
                f"{env.COMPARE.name}: nothing to compare {impl.op_name} with ({token}). {error}"
            ) from error
        if other == impl:
            self._leave_out(impl)
            return fn
        return self._compared(impl.op_name, number, fn, yardstick, takes)

    def _compared(
        self,
        op_name: str,
        number: int,
        fn: Function,
        yardstick: Function,
        takes: Predicate | None,
    ) -> Function:
        """Return ``fn`` with each result compared; the yardstick runs on copies of the inputs."""
        found = self.differences.setdefault((op_name, number), Difference(op_name, number))
        spec = get_spec(op_name)

        def run(*args: Any, **kwargs: Any) -> Any:
            taken = decision_about(takes, args, kwargs)
            if not taken:
                raise ComparisonError(
                    f"{op_name} cannot be compared with {self.yardsticks[op_name]}, which does not "
                    f"take the call: {taken.reason}"
                )
            copies = [_copy(value) for value in args]
            named_copies = {name: _copy(value) for name, value in kwargs.items()}
            result = fn(*args, **kwargs)
            try:
                expected = yardstick(*copies, **named_copies)
                written = spec.outputs(args, kwargs), spec.outputs(tuple(copies), named_copies)
            except Exception as error:
                raise ComparisonError(
                    f"{op_name} cannot be compared with {self.yardsticks[op_name]}, which raised "
                    f"{type(error).__name__}: {error}"
                ) from error
            self._note(found, (result, *written[0]), (expected, *written[1]))
            return result

        return run

    def _leave_out(self, impl: OpImpl) -> None:
        """Note, and say once an operator, that what runs is the yardstick itself."""
        if impl.op_name not in self.own:
            get_logger().warning(
                "%s of %s is not compared with itself: give %s another implementation than %s, or "
                "let another one run.",
                impl.impl_id, impl.op_name, env.COMPARE.name, self.yardsticks[impl.op_name],
            )  # fmt: skip
        self.own[impl.op_name] = impl.impl_id

    def reset(self) -> None:
        """Forget what was found."""
        for found in self.differences.values():  # which functions that are in use hold
            found.calls, found.absolute, found.relative = 0, 0.0, 0.0

    def report(self, bound: Mapping[str, int]) -> None:
        """Log what was found, the largest relative difference first, and what was not compared.

        Args:
            bound: operator -> how many layers have one.
        """
        for found in sorted(self.differences.values(), key=lambda d: -d.relative):
            if not found.calls:
                get_logger().warning(
                    "%s, layer %d: never called, nothing was compared with %s.",
                    found.op_name, found.number, self.yardsticks[found.op_name],
                )  # fmt: skip
                continue
            get_logger().info(
                "%s, layer %d: differs from %s by at most %.3g of the largest element "
                "(%.3g absolute) in %d calls", found.op_name, found.number,
                self.yardsticks[found.op_name], found.relative, found.absolute, found.calls,
            )  # fmt: skip

        compared = {op_name for op_name, _ in self.differences}
        for op_name, impl_id in self.own.items():
            if op_name not in compared:
                get_logger().warning(
                    "%s: nothing was compared with %s, which is %s, the implementation that ran.",
                    op_name, self.yardsticks[op_name], impl_id,
                )  # fmt: skip
        for op_name, token in self.yardsticks.items():
            if not bound.get(op_name):
                get_logger().warning(
                    "No layer called %s through vllm-fl: nothing was compared with %s.",
                    op_name, token,
                )  # fmt: skip

    def _note(self, found: Difference, result: Any, expected: Any) -> None:
        given, wanted = list(_tensors(result)), list(_tensors(expected))
        if _shapes(given) != _shapes(wanted):
            raise ComparisonError(
                f"{found.op_name} in layer {found.number} gave {_shapes(given)}, "
                f"{self.yardsticks[found.op_name]} {_shapes(wanted)}: shapes that cannot be "
                "compared."
            )
        found.calls += 1
        for ours, theirs in zip(given, wanted, strict=True):
            absolute, relative = _difference(ours, theirs)
            found.absolute = max(found.absolute, absolute)
            found.relative = max(found.relative, relative)
            if self.limit is not None and relative > self.limit:
                raise ComparisonError(
                    f"{found.op_name} in layer {found.number} differs from "
                    f"{self.yardsticks[found.op_name]} by {relative:.3g} of the largest element "
                    f"({absolute:.3g} absolute); the limit is {self.limit:.3g}."
                )


def _copy(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") and hasattr(value, "dtype") else value


def _tensors(result: Any) -> Iterator[Any]:
    if isinstance(result, (tuple, list)):
        for value in result:
            yield from _tensors(value)
    elif hasattr(result, "dtype"):
        yield result


def _shapes(tensors: Iterable[Any]) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors) or "nothing"


def _difference(ours: Any, theirs: Any) -> tuple[float, float]:
    if ours.numel() == 0:
        return 0.0, 0.0
    difference = (ours.double() - theirs.double()).abs()
    absolute = float(difference.masked_fill(ours == theirs, 0).max())  # equal infinities
    if math.isnan(absolute):
        return math.inf, math.inf
    return absolute, absolute / max(float(theirs.double().abs().max()), 1e-30)
