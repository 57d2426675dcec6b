"""The patch ledger: each attribute of vLLM that has to be rebound, and why."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """One attribute of vLLM that a worker process rebinds.

    Attributes:
        target: ``package.module:attribute``.
        replacement: The new value.
        why: Why vLLM's own value cannot be used.
        versions: Which vLLM versions need it.
        until: What has to happen before the entry can be deleted.
        needed: Tells from the installed vLLM whether the patch still has an effect.
    """

    target: str
    replacement: object
    why: str
    versions: str
    until: str
    needed: Callable[[], bool]

    def apply(self) -> None:
        """Rebinds the attribute."""
        module, _, attribute = self.target.partition(":")
        setattr(importlib.import_module(module), attribute, self.replacement)
