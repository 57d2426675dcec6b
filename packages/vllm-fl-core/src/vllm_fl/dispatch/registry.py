"""Who implements what."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vllm_fl.dispatch.errors import RegistrationError
from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.types import OpImpl


@dataclass(frozen=True)
class OpRegistrySnapshot:
    """The registry's content at one moment; it never changes.

    Attributes:
        impls_by_op: operator -> its implementations, in order of registration.
        version: grows with every change of the registry.
    """

    impls_by_op: Mapping[str, tuple[OpImpl, ...]]
    version: int


class OpRegistry:
    """The implementations of every operator. Thread-safe: writers copy, readers take no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._snapshot = OpRegistrySnapshot(MappingProxyType({}), 0)

    def copy(self) -> OpRegistry:
        """Return a registry with the present content, which nobody listens to."""
        other = OpRegistry()
        other._snapshot = self._snapshot
        return other

    def register_impl(self, impl: OpImpl) -> None:
        """Add one implementation; see :meth:`register_many`."""
        self.register_many((impl,))

    def register_many(self, impls: Iterable[OpImpl]) -> None:
        """Add implementations, all or none. Registering an equal one again changes nothing.

        Raises:
            UnknownOperatorError: an operator is not in the catalogue.
            RegistrationError: a function does not fit its operator's signature (one given as text
                is checked when it is loaded), or another implementation has the same operator and
                id.
        """
        with self._lock:
            table = dict(self._snapshot.impls_by_op)
            for impl in impls:
                table[impl.op_name] = _added(table.get(impl.op_name, ()), impl)
            self._publish(table)
        self._tell()

    def unregister(self, op_name: str, impl_id: str) -> None:
        """Remove one implementation; unknown ones are ignored."""
        with self._lock:
            table = dict(self._snapshot.impls_by_op)
            left = tuple(i for i in table.get(op_name, ()) if i.impl_id != impl_id)
            table.pop(op_name, None)
            if left:
                table[op_name] = left
            self._publish(table)
        self._tell()

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            self._publish({})
        self._tell()

    def snapshot(self) -> OpRegistrySnapshot:
        """Return the present content."""
        return self._snapshot

    def get_implementations(self, op_name: str) -> tuple[OpImpl, ...]:
        """Return the operator's implementations, in order of registration."""
        return self._snapshot.impls_by_op.get(op_name, ())

    def get_implementation(self, op_name: str, impl_id: str) -> OpImpl | None:
        """Return one implementation, or None."""
        return next((i for i in self.get_implementations(op_name) if i.impl_id == impl_id), None)

    def list_operators(self) -> list[str]:
        """Return the operators that have an implementation, sorted."""
        return sorted(self._snapshot.impls_by_op)

    def _publish(self, table: dict[str, tuple[OpImpl, ...]]) -> None:
        version = self._snapshot.version + 1
        self._snapshot = OpRegistrySnapshot(MappingProxyType(table), version)

    def listen(self, method: Callable[[], None]) -> None:
        """Call a bound method, held weakly, after every change, in the changing thread."""
        self._listeners.append(weakref.WeakMethod(method))

    def _tell(self) -> None:
        for reference in self._listeners:
            method = reference()
            if method is not None:
                method()

    def reinit_lock_after_fork(self) -> None:
        """Replace the lock in a forked child, where its holder no longer runs."""
        self._lock = threading.Lock()


def _added(present: tuple[OpImpl, ...], impl: OpImpl) -> tuple[OpImpl, ...]:
    spec = get_spec(impl.op_name)
    twin = next((i for i in present if i.impl_id == impl.impl_id), None)
    owner = f"{impl.impl_id} ({impl.wheel or 'registered by hand'})"
    if twin == impl:
        return present
    if twin is not None:
        raise RegistrationError(
            f"{impl.op_name}: {owner} is already registered by "
            f"{twin.wheel or 'another object registered by hand'}; give one another impl_id."
        )
    if callable(impl.fn):
        spec.check(impl.fn, owner)
    return (*present, impl)
