"""BoundOp: what a layer holds of an operator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import state

if TYPE_CHECKING:
    from vllm_fl.dispatch.manager import OpManager
    from vllm_fl.dispatch.policy import SelectionPolicy
    from vllm_fl.dispatch.types import OpImpl


class BoundOp:
    """A live handle on an operator: call it, or call its ``fn`` and pass errors to ``recover``.

    Attributes:
        op_name: the operator.
        number: the handle's number among those of its manager and operator, in order of binding.
        scoped: the policy of the context it was bound in; None for the process-wide one.
        fn: the chosen implementation, a plain function; replaced when the choice changes.
        impl: which implementation ``fn`` is; None when none may run (``fn`` then raises).
    """

    __slots__ = ("__weakref__", "_manager", "fn", "impl", "number", "op_name", "scoped")

    fn: Callable[..., Any]
    impl: OpImpl | None

    def __init__(
        self, manager: OpManager, op_name: str, number: int, scoped: SelectionPolicy | None
    ) -> None:
        self._manager = manager
        self.op_name = op_name
        self.number = number
        self.scoped = scoped
        self.impl = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the implementation; on an error fall back where that is allowed."""
        fn = self.fn
        try:
            return fn(*args, **kwargs) if kwargs else fn(*args)
        except Exception as error:
            return self.recover(fn, error, *args, **kwargs)

    def recover(
        self, fn: Callable[..., Any], error: Exception, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Answer a call in which ``fn`` raised ``error``: try the next one, or re-raise.

        A layer that calls ``fn`` itself inside ``try`` hands what it caught to this method.
        """
        policy = self.scoped or state.get_global_policy()
        return self._manager.recover(self.op_name, fn, policy, error, args, kwargs)

    def __copy__(self) -> BoundOp:
        """Return another live handle, bound under the same policy."""
        with _under(self.scoped):
            return self._manager.bind(self.op_name)

    def __deepcopy__(self, memo: object) -> BoundOp:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the operator's name and its policy: where it is loaded, it is bound anew."""
        return _bind_under, (self.op_name, self.scoped)

    def __repr__(self) -> str:
        return f"BoundOp({self.op_name!r} -> {self.impl.impl_id if self.impl else None!r})"


def _under(scoped: SelectionPolicy | None) -> AbstractContextManager[object]:
    return state.policy_context(scoped) if scoped else contextlib.nullcontext()


def _bind_under(op_name: str, scoped: SelectionPolicy | None) -> BoundOp:
    from vllm_fl.dispatch.default import bind_op

    with _under(scoped):
        return bind_op(op_name)
