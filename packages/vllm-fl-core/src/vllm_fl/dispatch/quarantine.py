"""Which implementations have failed and why; readers take no lock."""

from __future__ import annotations

import threading
from collections.abc import Mapping


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
