"""What an exception of an implementation means, and which implementations have failed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from vllm_fl.dispatch.errors import VllmFLError
from vllm_fl.dispatch.spec import OpSpec
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
    if isinstance(error, VllmFLError):
        return Decision.no("it is not the implementation's fault")
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
    """Whether ``error`` is Python's MemoryError, torch's OutOfMemoryError, or says the same."""
    if isinstance(error, MemoryError):
        return True
    if any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__):
        return True
    text = str(error).lower()
    return "out of memory" in text or "can't allocate memory" in text


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


class Quarantine:
    """Implementations that have failed, each with its reason, until the policy changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: Mapping[str, Mapping[str, str]] = {}

    def put(self, op_name: str, impl_id: str, reason: str) -> bool:
        """Add an implementation; return whether it was not there yet."""
        with self._lock:
            failed = self._failed.get(op_name, {})
            self._failed = {**self._failed, op_name: {**failed, impl_id: reason}}
            return impl_id not in failed

    def of(self, op_name: str) -> Mapping[str, str]:
        """Return implementation id -> reason."""
        return self._failed.get(op_name, {})

    def copy(self) -> dict[str, dict[str, str]]:
        """Return operator -> implementation id -> reason."""
        return {op: dict(failed) for op, failed in self._failed.items() if failed}

    def release(self, op_name: str, impl_id: str) -> None:
        """Let one implementation out again."""
        with self._lock:
            kept = {i: reason for i, reason in self.of(op_name).items() if i != impl_id}
            self._failed = {**self._failed, op_name: kept}

    def clear(self, op_name: str | None = None) -> None:
        """Let the implementations of one operator or of all out again."""
        with self._lock:
            kept = {op: f for op, f in self._failed.items() if op_name not in (None, op)}
            self._failed = kept

    def reinit_lock_after_fork(self) -> None:
        """Replace the lock in a forked child, where its holder no longer runs."""
        self._lock = threading.Lock()
