"""What an exception of an implementation means: whether another one may answer the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm_fl.dispatch.errors import PredicateError, VllmFLError, add_context
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.types import YES, Decision, OpImpl


def fall_back(
    error: Exception,
    impl: OpImpl,
    followers: Iterable[tuple[OpImpl, Callable[..., Any]]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    strict: bool,
) -> tuple[OpImpl, Any]:
    """Answer a call in which ``impl`` raised ``error`` with the first of ``followers`` that can.

    Args:
        error: what was raised.
        impl: which implementation raised it.
        followers: what to try then; asked for only if the call may be repeated.
        args: the call's arguments.
        kwargs: the call's named arguments.
        strict: whether nothing falls back.

    Returns:
        The implementation that answered, and its answer.

    Raises:
        Exception: ``error``, with a note that tells the call and why nothing else answered it.
    """
    decision = may_retry(error, impl, args, kwargs, strict)
    exhausted = "no other implementation may run"
    for follower, fn in followers if decision else ():
        try:
            return follower, fn(*args, **kwargs)
        except Exception as second:
            add_context(error, f"{follower.impl_id!r} failed, too: {second!r}")
            decision = may_retry(second, follower, args, kwargs, strict=False)
            exhausted = "every implementation failed"
            if not decision:
                break
    context = f"{describe_failure(impl, args, kwargs)} ({decision.reason or exhausted})"
    add_context(error, context)
    if not hasattr(error, "__notes__"):  # before Python 3.11 an exception has no notes
        get_logger().error("%s: %s %s", type(error).__name__, error, context)
    raise error


def may_retry(
    error: Exception,
    impl: OpImpl,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    strict: bool,
) -> Decision:
    """Whether the call that failed with ``error`` may be given to the next implementation."""
    if strict:
        return Decision.no("strict mode")
    if isinstance(error, VllmFLError):
        return Decision.no("it is not the implementation's fault")
    if is_out_of_memory(error):
        return Decision.no("out of memory says nothing about the implementation")
    spec = get_spec(impl.op_name)
    try:
        spec.signature.bind(*args, **kwargs)
    except TypeError as misuse:
        return Decision.no(f"the call does not fit the operator: {misuse}")
    launched = not isinstance(error, PredicateError)
    if launched and impl.in_place and spec.donates(args, kwargs):
        return Decision.no("its donated arguments may have been overwritten")
    return YES


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is Python's MemoryError, torch's OutOfMemoryError, or says the same."""
    if isinstance(error, MemoryError):
        return True
    if any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__):
        return True
    text = str(error).lower()
    return "out of memory" in text or "can't allocate memory" in text


def describe_failure(impl: OpImpl, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Say in which operator and implementation a call failed, and the arguments' shapes."""
    return (
        f"in operator {impl.op_name!r}, implementation {impl.impl_id!r}, called with "
        f"{describe_call(args, kwargs)}"
    )


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Write the arguments of a call with shapes and dtypes instead of values."""
    parts = [_describe(value) for value in args]
    parts += [f"{name}={_describe(value)}" for name, value in kwargs.items()]
    return f"({', '.join(parts)})"


def _describe(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)} on {getattr(value, 'device', 'cpu')}"
    return repr(value)[:60]
