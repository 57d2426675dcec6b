"""Turning implementations into what is called: loaded, checked, guarded by predicates, counted.

Whatever is handed out is a function; ``owner`` tells which implementation it ran, also after the
choice has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_fl.dispatch.counters import Counters
from vllm_fl.dispatch.errors import NoImplementationError
from vllm_fl.dispatch.failure import describe_call
from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.predicate import predicate
from vllm_fl.dispatch.types import OpImpl

Function = Callable[..., Any]
Observer = Callable[[OpImpl, Function], Function]


class Callables:
    """The functions of one manager's implementations.

    Attributes:
        counters: counts of calls, declines and fall-backs; calls only while enabled.
        observer: what each function is handed to, to be called in its place; None for none.
    """

    def __init__(self) -> None:
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

        def choose_and_call(*args: Any, **kwargs: Any) -> Any:
            for decide, fn, impl in steps:
                if decide is None or decide(*args, **kwargs).accepted:
                    return fn(*args, **kwargs)
                if counters is not None:
                    counters.declined(impl)
            raise _nobody_takes([impl for _, _, impl in steps], args, kwargs)

        return self.own(choose_and_call, [impl for _, _, impl in steps])

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
            if decide is None or decide(*args, **kwargs).accepted:
                return impl
        return None


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
