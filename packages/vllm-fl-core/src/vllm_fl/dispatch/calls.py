"""Turning implementations into what is called: loaded, checked, guarded by predicates, counted.

Whatever is handed out is a function; ``owner`` tells which implementation it ran, also after the
choice has changed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_fl.dispatch.counters import Counters
from vllm_fl.dispatch.errors import NoImplementationError, PredicateError
from vllm_fl.dispatch.failure import describe_call
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.predicate import Predicate, decision_about, predicate
from vllm_fl.dispatch.types import OpImpl

logger = get_logger()
Function = Callable[..., Any]
Observer = Callable[[OpImpl, Function], Function]


class Callables:
    """The functions of one manager's implementations.

    Args:
        note_use: called with what answers calls in place of a first choice that declines them.

    Attributes:
        counters: counts of calls, declines and fall-backs; calls only while enabled.
        observer: what each function is handed to, to be called in its place; None for none.
    """

    def __init__(self, note_use: Callable[[OpImpl], None]) -> None:
        self._note_use = note_use
        self._told: set[tuple[OpImpl, OpImpl]] = set()
        self.counters = Counters()
        self.observer: Observer | None = None
        self._owners: dict[tuple[str, int], tuple[object, tuple[OpImpl, ...]]] = {}

    def function(self, impl: OpImpl) -> Function:
        """Return one implementation as a function, its calls counted while that is on.

        Raises:
            BackendLoadError: it cannot be imported.
            RegistrationError: it does not fit the operator's signature.
        """
        fn = impl.load()
        get_spec(impl.op_name).check(fn, f"{impl.impl_id} ({impl.wheel or 'by hand'})")
        if self.counters.enabled:
            fn = self.counters.counted(impl, fn)
        if self.observer is not None:
            fn = self.observer(impl, fn)
        return self.own(fn, (impl,))

    def first_that_takes(self, order: Sequence[OpImpl]) -> Function:
        """Return what calls the first implementation in ``order`` that takes the arguments.

        That is the first choice's own function if it takes whatever the operator takes.
        """
        steps = []
        for impl in order:
            steps.append((predicate(impl), self.function(impl), impl))
            if steps[-1][0] is None:
                break
        if steps[0][0] is None:
            return steps[0][1]
        counters = self.counters if self.counters.enabled else None
        first, reason_of, is_traced = steps[0][2], steps[0][0], _tracer()

        def choose_and_call(*args: Any, **kwargs: Any) -> Any:
            for decide, fn, impl in steps:
                if decide is None or decide(*args, **kwargs).accepted:
                    if impl is not first and not is_traced():
                        self._tell(first, reason_of, impl, args, kwargs)
                    return fn(*args, **kwargs)
                if counters is not None:
                    counters.declined(impl)
            raise _nobody_takes([impl for _, _, impl in steps], args, kwargs)

        return self.own(choose_and_call, [impl for _, _, impl in steps])

    def _tell(
        self,
        first: OpImpl,
        decide: Predicate | None,
        taker: OpImpl,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Say, once for each two, that a call went past the first choice, and why."""
        if (first, taker) not in self._told:
            self._told.add((first, taker))
            self._note_use(taker)
            logger.info(
                "%s: %s does not take some calls, %s does: %s", first.op_name, first.impl_id,
                taker.impl_id, decision_about(decide, args, kwargs).reason,
            )  # fmt: skip

    def own(self, fn: Function, impls: Sequence[OpImpl]) -> Function:
        """Remember, as long as ``fn`` lives, that it runs the first of ``impls`` that takes a call.

        A handle or a running call keeps it alive; its number may be another function's afterwards.
        """
        owners, key = self._owners, (impls[0].op_name, id(fn))
        # Few callables cannot be held weakly: objects with __slots__, which their modules keep.
        weak = type(fn).__weakrefoffset__
        held = weakref.ref(fn, lambda _: owners.pop(key, None)) if weak else fn
        owners[key] = held, tuple(impls)
        return fn

    def own_as(self, op_name: str, fn: Function, other: Function) -> Function:
        """Remember, as long as ``fn`` lives, that it runs what ``other`` runs."""
        return self.own(fn, self._owners[op_name, id(other)][1])

    def owner(
        self, op_name: str, fn: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> OpImpl | None:
        """Return which implementation a call of ``fn`` ran; None if it ran none."""
        _, order = self._owners.get((op_name, id(fn)), (fn, ()))
        for impl in order:
            decide = predicate(impl)
            try:
                if decide is None or decide(*args, **kwargs).accepted:
                    return impl
            except PredicateError:  # which is what the call raised
                return impl
        return None


def _tracer() -> Callable[[], bool]:
    """Return what tells whether torch.compile traces a call, in which nothing can be said."""
    torch = sys.modules.get("torch")
    return torch.compiler.is_compiling if torch is not None else bool


def _nobody_takes(
    order: Sequence[OpImpl], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> NoImplementationError:
    lines = [f"No implementation of {order[0].op_name!r} takes these arguments."]
    for impl in order:
        decide = predicate(impl)
        if decide is not None:
            lines.append(f"  {impl.impl_id}: {decide(*args, **kwargs).reason}")
    lines.append(f"Called with {describe_call(args, kwargs)}.")
    return NoImplementationError("\n".join(lines))
