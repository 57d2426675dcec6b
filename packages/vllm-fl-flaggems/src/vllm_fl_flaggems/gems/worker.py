"""Enabling flag_gems' ATen operators in a process that runs a model.

What PyTorch calls in eager code, and what a CUDA graph captures of it, then runs flag_gems'
kernels. Code that Inductor has compiled does not: it calls no ATen operator where it has made a
kernel of its own.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.logging import get_logger
from vllm_fl_flaggems.gems.aten import Selection
from vllm_fl_flaggems.gems.mends import MENDS, refusal_of_kernels
from vllm_fl_flaggems.gems.source import Installed
from vllm_fl_flaggems.gems.tuning import guard_tuners, remember, set_damaged_caches_aside

logger = get_logger("vllm_fl.flaggems")


class Unavailable(Exception):
    """flag_gems cannot be used in this process; the text says why."""


@dataclass(frozen=True)
class Enabled:
    """What has been enabled in this process.

    Attributes:
        selection: what was asked for.
        library: holds the registrations; destroying it undoes them.
        functions: ATen operator -> the function of flag_gems that runs it.
        refused: ATen operator -> why it was not enabled.
    """

    selection: Selection
    library: torch.library.Library
    functions: dict[str, Callable[..., Any]]
    refused: dict[str, str]


class Registrations:
    """What flag_gems takes for a torch library: registers the chosen operators, and remembers.

    flag_gems itself passes over an operator that cannot be registered with a line in its log.
    """

    def __init__(self, library: torch.library.Library, keys: frozenset[str]) -> None:
        self.library = library
        self.keys = keys
        self.functions: dict[str, Callable[..., Any]] = {}
        self.refused: dict[str, str] = {}

    def impl(
        self, key: str, function: Callable[..., Any], dispatch_key: str = "", **options: Any
    ) -> None:
        """Register one operator if it is among the chosen ones."""
        if key not in self.keys:
            return
        module = sys.modules[function.__module__]
        reason = refusal_of_kernels(inspect.getsource(module))
        if not reason:
            try:
                self.library.impl(key, function, dispatch_key, **options)
            except RuntimeError as error:
                reason = f"torch refuses it: {error}"
        if reason:
            self.refused[key] = reason
        else:
            self.functions[key] = function


_enabled: Enabled | None = None


def enabled() -> Enabled | None:
    """Return what is enabled in this process, or None."""
    return _enabled


def enable(found: Installed, selection: Selection) -> Enabled:
    """Let flag_gems run the chosen ATen operators on its device, once a process and selection.

    Args:
        found: the installed flag_gems.
        selection: the operators.

    Raises:
        Unavailable: flag_gems cannot be imported here.
        ConfigError: an operator that the user's whitelist names cannot be enabled.
    """
    global _enabled
    if _enabled is not None:
        if _enabled.selection == selection:
            return _enabled
        disable()
    flag_gems = import_mended(found)
    library = torch.library.Library("aten", "IMPL")
    registrations = Registrations(library, selection.keys)
    with warnings.catch_warnings():
        # Overriding torch's kernels is what is wanted.
        warnings.simplefilter("ignore")
        flag_gems.enable(lib=registrations, unused=[])
    lost = {key: registrations.refused.get(key, "") for key in selection.named}
    for key in registrations.functions:
        lost.pop(key, None)
    if lost:
        library._destroy()
        reasons = (f"{key}: {why or _NOT_HERE}" for key, why in sorted(lost.items()))
        raise ConfigError(
            f"flagos_whitelist names operators that flag_gems {found.version} cannot run here: "
            f"{'; '.join(reasons)}. Take them off the list."
        )
    _enabled = Enabled(selection, library, registrations.functions, registrations.refused)
    return _enabled


_NOT_HERE = "flag_gems leaves it out on this device or with this torch"


def disable() -> None:
    """Give the operators back to PyTorch."""
    global _enabled
    if _enabled is not None:
        _enabled.library._destroy()
        _enabled = None


def import_mended(found: Installed) -> Any:
    """Import flag_gems, mend what the ledger says, and return the module.

    Raises:
        Unavailable: the import fails; it needs its device and several packages.
    """
    set_damaged_caches_aside()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own, about what it does not have
            flag_gems = importlib.import_module("flag_gems")
    except (Exception, SystemExit) as error:
        raise Unavailable(
            f"flag_gems {found.version} cannot be imported here: {type(error).__name__}: {error}"
        ) from error
    for mend in MENDS:
        if mend.needed(found):
            mend.apply()
    remember()
    guard_tuners(found.folder)
    return flag_gems
