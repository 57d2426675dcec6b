"""Exceptions of vllm-fl. Every message says what was given, what is allowed and what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterable


class VllmFLError(Exception):
    """Base class of every error that vllm-fl raises itself."""


class ConfigError(VllmFLError, ValueError):
    """A setting (environment variable, YAML file, policy argument) cannot be used as given."""


class RegistrationError(VllmFLError, ValueError):
    """An implementation cannot be registered: wrong signature, bad declaration, or a conflict."""


class BackendLoadError(VllmFLError, ImportError):
    """A backend that the user named, or an implementation's module, cannot be loaded."""


class PredicateError(Exception):
    """An implementation's predicate raised when it was asked about a call: that is its fault."""


class UnknownOperatorError(VllmFLError, LookupError):
    """The operator is not in the catalogue."""


class NoImplementationError(VllmFLError, RuntimeError):
    """No implementation of an operator may run; the message gives the reason for each one."""


def nearest(given: object, allowed: Iterable[str]) -> str:
    """Return a sentence that names the nearest valid spelling, or lists what is allowed."""
    import difflib  # only a mistake pays for it

    options = sorted(allowed)
    known = [option.lower() for option in options]
    close = difflib.get_close_matches(str(given).lower(), known, n=1, cutoff=0.6)
    if close:
        match = next(o for o in options if o.lower() == close[0])
        return f"Did you mean {match!r}? Allowed: {', '.join(options)}."
    return f"Allowed: {', '.join(options) or 'nothing'}."


def add_context(error: BaseException, text: str) -> None:
    """Attach ``text`` to ``error`` as a note (PEP 678; a no-op before Python 3.11)."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
