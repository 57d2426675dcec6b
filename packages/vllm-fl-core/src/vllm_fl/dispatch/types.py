"""The data that dispatch works on: kinds, decisions, implementations.

Nothing here imports torch. An implementation may be a callable or the text
``"package.module:function"``, which is imported when the implementation is chosen, not before.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Any

from vllm_fl.dispatch.errors import BackendLoadError, RegistrationError


class BackendImplKind(str, Enum):
    """Where an implementation comes from. The values are the order tokens that users write."""

    DEFAULT = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"

    def __str__(self) -> str:
        return self.value


class BackendPriority(IntEnum):
    """The priority an implementation has when it names none; higher is tried first."""

    DEFAULT = 150
    VENDOR = 100
    REFERENCE = 50


@dataclass(frozen=True)
class Decision:
    """A yes, or a no with its reason. True in a boolean context when accepted."""

    accepted: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.accepted

    @staticmethod
    def no(reason: str) -> Decision:
        """Return a refusal; ``reason`` is shown to the user as it is."""
        return Decision(False, reason)

    @staticmethod
    def of(answer: object, reason: str) -> Decision:
        """Turn what a predicate returned (Decision, bool, or text saying why not) into a Decision.

        Args:
            answer: the predicate's answer; a non-empty text is a "no" with that text as its reason.
            reason: the reason to give for a bare ``False``.
        """
        if isinstance(answer, Decision):
            return answer
        if isinstance(answer, str):
            return Decision(not answer, answer)
        return YES if answer else Decision(False, reason)


YES = Decision(True)

_REFERENCE = re.compile(r"[\w.]+:[\w.]+")

DTYPES = frozenset(
    {
        "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz",
        "float8_e5m2", "float8_e5m2fnuz", "int8", "int16", "int32", "int64", "uint8", "bool",
    }
)  # fmt: skip
"""Names of torch dtypes that an implementation may declare."""


def load_object(reference: str) -> Any:
    """Import ``"package.module:qualified.name"`` and return the object.

    Raises:
        BackendLoadError: the text has another form, or the module or name cannot be imported.
    """
    if not isinstance(reference, str):
        raise BackendLoadError(f"{reference!r} is not a text of the form 'package.module:name'.")
    module_name, separator, qualname = reference.partition(":")
    if not (module_name and separator and qualname):
        raise BackendLoadError(f"{reference!r} is not of the form 'package.module:name'.")
    try:
        target: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise BackendLoadError(
            f"Cannot import {module_name!r} (for {reference!r}): {type(error).__name__}: {error}"
        ) from error
    try:
        for part in qualname.split("."):
            target = getattr(target, part)  # which a lazy module may answer by an import
    except (Exception, SystemExit) as error:
        raise BackendLoadError(
            f"{module_name!r} has no {qualname!r} (for {reference!r}): "
            f"{type(error).__name__}: {error}"
        ) from error
    return target


@dataclass(frozen=True)
class OpImpl:
    """One implementation of one operator.

    Attributes:
        op_name: the operator, a name from the catalogue (``vllm_fl.dispatch.ops``).
        impl_id: unique among the operator's implementations: ``default.flagos``,
            ``vendor.<name>``, ``reference.torch``, with a suffix when a wheel offers several.
        kind: DEFAULT, VENDOR or REFERENCE.
        fn: the function, or ``"package.module:function"`` imported when it is first chosen.
        vendor: the vendor's name; required for VENDOR.
        priority: order among implementations that the same order token matches.
        available: asked once per policy epoch: can it run on this machine at all? Returns a bool,
            a :class:`Decision`, or a text that says why not. A function that carries an attribute
            ``_is_available`` is asked through that when this is not given.
        supports: asked before a call with the operator's own arguments: metadata only, must not
            launch, allocate or synchronise. Same answers as ``available``.
        dtypes: torch dtypes of the first argument that it takes, by name; None for any.
        min_arch: lowest device architecture it runs on, as 10 * major + minor (90 for Hopper).
        traceable: torch.compile may trace into it; False means an opaque torch custom op.
        in_place: overwrites donated arguments, so that a call that has failed cannot be retried.
        note: what it is, for people: a text, or ``"package.module:function"`` that returns one for
            the operator's name, called when someone asks.
        distribution: name of the wheel it came from, filled in at discovery.
        version: version of that wheel.
    """

    op_name: str
    impl_id: str
    kind: BackendImplKind
    fn: Callable[..., Any] | str = field(hash=False)
    vendor: str | None = None
    priority: int | None = None
    available: Callable[[], object] | None = field(default=None, hash=False)
    supports: Callable[..., object] | str | None = field(default=None, hash=False)
    dtypes: tuple[str, ...] | None = None
    min_arch: int | None = None
    traceable: bool = True
    in_place: bool = True
    note: str = ""
    distribution: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, BackendImplKind):
            object.__setattr__(self, "kind", BackendImplKind(self.kind))
        if self.kind is BackendImplKind.VENDOR and not self.vendor:
            raise RegistrationError(
                f"{self.op_name}/{self.impl_id}: kind VENDOR needs vendor='<name>', got "
                f"{self.vendor!r}."
            )
        if not (callable(self.fn) or isinstance(self.fn, str)):
            raise RegistrationError(
                f"{self.op_name}/{self.impl_id}: fn must be callable or 'package.module:function', "
                f"got {self.fn!r}."
            )
        if isinstance(self.dtypes, str):
            raise RegistrationError(
                f"{self.op_name}/{self.impl_id}: dtypes={self.dtypes!r} is not a tuple of names. "
                f"Write ({self.dtypes!r},)."
            )
        if self.dtypes is not None:
            object.__setattr__(self, "dtypes", tuple(self.dtypes))
        unknown = [name for name in self.dtypes or () if name not in DTYPES]
        if unknown:
            raise RegistrationError(
                f"{self.op_name}/{self.impl_id}: unknown dtypes {unknown}. "
                f"Allowed: {', '.join(sorted(DTYPES))}."
            )
        if self.priority is None:
            object.__setattr__(self, "priority", int(BackendPriority[self.kind.name]))

    @property
    def wheel(self) -> str:
        """Distribution and version as shown to users; empty for one registered by hand."""
        return f"{self.distribution} {self.version}".strip()

    def load(self) -> Callable[..., Any]:
        """Return the function, importing it if it was given as text."""
        return load_object(self.fn) if isinstance(self.fn, str) else self.fn

    def described(self) -> str:
        """Return the note, asking the function that it names; a failure is told in its place."""
        if not _REFERENCE.fullmatch(self.note):
            return self.note
        try:
            return str(load_object(self.note)(self.op_name))
        except Exception as error:
            return f"its note cannot be had: {type(error).__name__}: {error}"

    def availability(self) -> Decision:
        """Ask whether this implementation can run on this machine; an exception is a no."""
        probe = self.available or getattr(self.fn, "_is_available", None)
        if probe is None:
            return YES
        try:
            return Decision.of(probe(), "its backend reports that it is not available here")
        except (Exception, SystemExit) as error:
            return Decision.no(f"its availability check raised {type(error).__name__}: {error}")

    def is_available(self) -> bool:
        """Whether this implementation can run on this machine."""
        return self.availability().accepted

    def from_wheel(self, distribution: str, version: str) -> OpImpl:
        """Return a copy that says which wheel it came from, unless it says so already."""
        if self.distribution:
            return self
        return replace(self, distribution=distribution, version=version)
