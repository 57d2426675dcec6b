"""Which implementations there are, and whether they are those that a study was made with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from vllm_fl.dispatch import discovery, env
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.registry import OpRegistry

Implementations: TypeAlias = Mapping[str, Mapping[str, str]]
"""Operator -> implementation id -> the wheel, or the module named by hand, that registers it."""


def registered() -> dict[str, dict[str, str]]:
    """Return the implementations that the backends found here register.

    Raises:
        BackendLoadError: a module that VLLM_FL_PLUGIN_MODULES names cannot be used.
    """
    discovery.discover_plugins(OpRegistry())
    found: dict[str, dict[str, str]] = {}
    for record in discovery.get_discovered_plugins():
        for impl in record.registered:
            found.setdefault(impl.op_name, {})[impl.impl_id] = record.distribution or record.name
    return found


def check_same(made: Implementations, here: Implementations) -> None:
    """Refuse a study that was made with other implementations than there are here.

    Raises:
        ConfigError: the text names those that are absent and those that are new.
    """
    was, now = _flat(made), _flat(here)
    differences = [
        f"{state} here: {', '.join(_described(which))}"
        for state, which in (("absent", was - now), ("new", now - was))
        if which
    ]
    if differences:
        raise ConfigError(
            f"The study was made with other implementations; {'; '.join(differences)}. Install the "
            f"same wheels, set {env.PLUGIN_MODULES.name} as it was, or give another --storage."
        )


def _flat(implementations: Implementations) -> set[tuple[str, str, str]]:
    return {
        (origin, impl_id, op_name)
        for op_name, by_id in implementations.items()
        for impl_id, origin in by_id.items()
    }


def _described(implementations: Iterable[tuple[str, str, str]]) -> list[str]:
    """Name implementations by their operators, those of one id and origin together."""
    operators: dict[tuple[str, str], list[str]] = {}
    for origin, impl_id, op_name in sorted(implementations):
        operators.setdefault((origin, impl_id), []).append(op_name)
    return [
        f"{impl_id} of {origin} ({', '.join(names)})"
        for (origin, impl_id), names in operators.items()
    ]
