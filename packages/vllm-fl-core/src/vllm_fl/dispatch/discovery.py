"""Finding backends: the entry-point group ``vllm_fl.backends`` and VLLM_FL_PLUGIN_MODULES.

Each backend is loaded alone, once a process: one that cannot be loaded loses itself with its
reason, and what the user named in VLLM_FL_PLUGIN_MODULES must work or raise.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import env
from vllm_fl.dispatch.backend import BACKEND_API, Backend, Device
from vllm_fl.dispatch.errors import BackendLoadError
from vllm_fl.dispatch.registry import OpRegistry
from vllm_fl.dispatch.types import YES, Decision, OpImpl, load_object

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PLUGIN_GROUP = "vllm_fl.backends"
PLUGIN_MODULES_ENV = env.PLUGIN_MODULES.name


@dataclass(eq=False)
class DiscoveredBackend:
    """One backend that was found, usable or not.

    Attributes:
        name: its name.
        source: the entry point or the variable that named it.
        distribution: the wheel it came from; empty for a module named by hand.
        version: the wheel's version.
        backend: the Backend instance; None for one that only registers functions.
        register_builtins: the function of a backend without a Backend class.
        decision: whether it can be used, and why not.
        details: the traceback of what went wrong.
        problems: operators that lost themselves alone at registration, each with its reason.
        registered: what it has registered.
    """

    name: str
    source: str
    distribution: str = ""
    version: str = ""
    backend: Backend | None = None
    register_builtins: Callable[[OpRegistry], object] | None = None
    decision: Decision = YES
    details: str = ""
    problems: list[str] = field(default_factory=list)
    registered: tuple[OpImpl, ...] = ()

    @property
    def device(self) -> Device | None:
        """The device that the backend brings to vLLM, if any."""
        return self.backend.device if self.backend is not None else None

    @property
    def is_named(self) -> bool:
        """Whether the user named it, so that it must work."""
        return self.source == PLUGIN_MODULES_ENV

    @property
    def wheel(self) -> str:
        """Distribution and version as shown to users."""
        return f"{self.distribution} {self.version}".strip()

    def reject(self, reason: str) -> None:
        """Record why the backend cannot be used."""
        self.decision = Decision.no(reason)

    def register(self, registry: OpRegistry) -> None:
        """Register what the backend implements; an operator that does not fit loses itself alone.

        Raises:
            BackendLoadError: there is such an operator, and the user named the backend.
            Exception: whatever the backend raised. Nothing of it is registered in either case.
        """
        self.problems.clear()
        self.registered = ()
        registered = []
        if self.backend is not None:
            scratch = registry.copy()
            for impl in self.backend.implementations():
                try:
                    if isinstance(impl, Exception):
                        raise impl
                    impl = impl.from_wheel(self.distribution, self.version)
                    scratch.register_impl(impl)
                    registered.append(impl)
                except Exception as error:
                    self.problems.append(str(error))
            if self.problems and self.is_named:
                raise BackendLoadError(f"it has lost operators: {'; '.join(self.problems)}")
        elif self.register_builtins is not None:
            collected = OpRegistry()
            self.register_builtins(collected)
            groups = collected.snapshot().impls_by_op.values()
            impls = [impl for group in groups for impl in group]
            registered = [impl.from_wheel(self.distribution, self.version) for impl in impls]
        registry.register_many(registered)
        self.registered = tuple(registered)


def normalise(distribution: str) -> str:
    """Normalise a distribution's name as the packaging specifications say."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True)
class Found:
    """An entry point with the name and version of its distribution, read once."""

    entry: EntryPoint
    distribution: str
    version: str

    @property
    def owns_name(self) -> bool:
        """Whether the distribution is the one that the entry point's name belongs to."""
        return normalise(self.distribution) == f"vllm-fl-{self.entry.name}"


def scan() -> list[Found]:
    """Return the entry points of installed backends, sorted, one a distribution and name.

    A distribution that is found twice (an editable install beside metadata of the source tree, an
    older copy later on the path) counts once, as the import system would have it: the first. Of
    wheels that use the same name, vllm-fl-NAME comes first.
    """
    from importlib.metadata import entry_points

    first: dict[tuple[str, str], Found] = {}
    for entry in entry_points(group=PLUGIN_GROUP):
        name, version = _name_and_version(entry)
        found = Found(entry, name, version)
        first.setdefault((entry.name, normalise(found.distribution) or entry.value), found)
    return sorted(
        first.values(), key=lambda f: (f.entry.name, not f.owns_name, normalise(f.distribution))
    )


def _name_and_version(entry: EntryPoint) -> tuple[str, str]:
    """Read a distribution's metadata once; every look at ``dist.name`` would parse it again."""
    metadata = entry.dist.metadata if entry.dist is not None else None
    if metadata is None:
        return "", ""
    # Not get(), which typed metadata has since Python 3.12 only.
    name, version = (metadata[k] if k in metadata else "" for k in ("Name", "Version"))  # noqa: SIM401
    return name, version


_lock = threading.RLock()
_found: tuple[DiscoveredBackend, ...] | None = None


def get_discovered_plugins() -> tuple[DiscoveredBackend, ...]:
    """Find and load every backend, once a process; sorted by name.

    Raises:
        BackendLoadError: a module that VLLM_FL_PLUGIN_MODULES names cannot be used.
    """
    global _found
    with _lock:
        if _found is None:
            _found = tuple(sorted(_discover(), key=lambda record: record.name))
        return _found


def knows_listed_name(name: str) -> Decision:
    """Say whether a backend knows a name of the flagos lists that the catalogue does not have."""
    reasons = []
    for record in get_discovered_plugins():
        if record.decision and record.backend is not None:
            decision = _knows(record.name, record.backend, name)
            if decision:
                return YES
            reasons.append(decision.reason)
    return Decision.no(" ".join(filter(None, reasons)))


def _knows(backend_name: str, backend: Backend, name: str) -> Decision:
    try:
        return Decision.of(backend.knows(name), "")
    except (Exception, SystemExit) as error:
        reason = f"{backend_name} cannot say whether it knows {name!r}: {type(error).__name__}"
        return Decision.no(f"{reason}: {error}.")


def clear_discovered_plugins() -> None:
    """Forget what was found, so that the next call looks again."""
    global _found
    with _lock:
        _found = None


def discover_plugins(registry: OpRegistry) -> int:
    """Register every usable backend in ``registry``; return how many there are.

    Raises:
        BackendLoadError: a module that VLLM_FL_PLUGIN_MODULES names cannot be used.
    """
    usable = 0
    for record in get_discovered_plugins():
        if not (record.decision or record.is_named):
            continue
        try:
            record.register(registry)
            record.decision, record.details = YES, ""  # a named one may have failed before
            usable += 1
        except (Exception, SystemExit) as error:
            _reject(record, f"it cannot be registered: {type(error).__name__}: {error}")
    return usable


def _reject(record: DiscoveredBackend, reason: str) -> None:
    """Refuse a backend because of the exception being handled; raise if the user named it."""
    record.reject(reason)
    record.details = traceback.format_exc()
    if record.is_named:
        raise BackendLoadError(
            f"{PLUGIN_MODULES_ENV} names {record.name!r}, but {reason}"
        )  # chained to the exception being handled


def _discover() -> list[DiscoveredBackend]:
    found = []
    owners: dict[str, str] = {}
    for item in scan():
        name = item.entry.name
        source = f"entry point {item.entry.value}"
        record = DiscoveredBackend(name, source, item.distribution, item.version)
        found.append(record)
        owner = owners.setdefault(name, item.distribution)
        if owner == item.distribution:
            _load(record, functools.partial(_load_entry, item.entry))
        else:
            record.reject(f"the name {name!r} is taken by {owner}; uninstall one of the two")
    for name in dict.fromkeys(env.PLUGIN_MODULES.read()):
        record = DiscoveredBackend(name, source=PLUGIN_MODULES_ENV)
        found.append(record)
        _load(record, functools.partial(_import_named, name))
    return found


def _load_entry(entry: EntryPoint) -> Any:
    """Load an entry point and see that its module is the wheel's own.

    Raises:
        BackendLoadError: another copy of the module comes earlier on the path.
    """
    target = entry.load()
    record = (entry.dist.read_text("RECORD") or "") if entry.dist is not None else ""
    stem = entry.module.replace(".", "/")
    for path in (f"{stem}.py", f"{stem}/__init__.py"):
        # An editable install does not record its modules.
        if entry.dist is not None and f"\n{path}," in f"\n{record}":
            own = os.path.realpath(str(entry.dist.locate_file(path)))
            loaded = os.path.realpath(sys.modules[entry.module].__file__ or "")
            if loaded != own:
                raise BackendLoadError(
                    f"the module {entry.module!r} was imported from {loaded}, not from the wheel's "
                    f"own copy {own}; remove the copy that shadows it"
                )
    return target


def _import_named(name: str) -> Any:
    return load_object(name) if ":" in name else importlib.import_module(name)


def _load(record: DiscoveredBackend, load: Callable[[], Any]) -> None:
    try:
        target = load()
        if isinstance(target, type) and issubclass(target, Backend):
            target = target()
        if isinstance(target, Backend):
            _accept_backend(record, target)
        else:
            record.register_builtins = _registration_function(target)
    except (Exception, SystemExit) as error:
        _reject(record, f"it cannot be loaded: {type(error).__name__}: {error}")


def _accept_backend(record: DiscoveredBackend, backend: Backend) -> None:
    if record.distribution and backend.name != record.name:
        raise BackendLoadError(
            f"the entry point is named {record.name!r} but its backend {backend.name!r}"
        )
    for name, kind, allowed in (
        ("operators", Mapping, "a mapping from operators to 'module:function'"),
        ("device", (Device, type(None)), "a Device or None"),
        ("name", str, "a text"),
    ):
        if not isinstance(getattr(backend, name), kind):
            raise BackendLoadError(f"its {name} is {getattr(backend, name)!r}, not {allowed}")
    needed = backend.api_version
    if not (isinstance(needed, tuple) and [type(n) for n in needed] == [int, int]):
        raise BackendLoadError(f"its api_version is {needed!r}, not a pair of integers")
    if needed[0] != BACKEND_API[0] or needed > BACKEND_API:
        raise BackendLoadError(
            f"it was written for backend API {needed[0]}.{needed[1]}, this vllm-fl-core provides "
            f"{BACKEND_API[0]}.{BACKEND_API[1]}; install versions that match"
        )
    record.name = backend.name
    record.backend = backend


def _registration_function(target: Any) -> Callable[[OpRegistry], object]:
    function = target
    if isinstance(target, ModuleType):
        function = getattr(target, "register_builtins", None)
    if not callable(function):
        raise BackendLoadError(
            f"{target!r} is neither a Backend class nor a function register_builtins(registry), "
            "nor a module that has one; name a class as module:Class"
        )
    return function  # type: ignore[no-any-return]


def reinit_lock_after_fork() -> None:
    """Replace the lock in a forked child, where its holder no longer runs."""
    global _lock
    _lock = threading.RLock()
