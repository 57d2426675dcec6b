"""What an exception of an implementation means: may another one be tried?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_fl.dispatch.ops import OpSpec
from vllm_fl.dispatch.types import YES, Decision, OpImpl


def may_retry(
    error: Exception,
    spec: OpSpec,
    impl: OpImpl,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    strict: bool,
) -> Decision:
    """Whether the call that failed with ``error`` may be given to the next implementation."""
    if strict:
        return Decision.no("strict mode")
    if is_out_of_memory(error):
        return Decision.no("out of memory says nothing about the implementation")
    try:
        spec.signature.bind(*args, **kwargs)
    except TypeError as misuse:
        return Decision.no(f"the call does not fit the operator: {misuse}")
    if impl.in_place and spec.donates(args, kwargs):
        return Decision.no("its donated arguments may have been overwritten")
    return YES


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is Python's MemoryError or torch's OutOfMemoryError (any device's)."""
    return isinstance(error, MemoryError) or any(
        cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__
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
