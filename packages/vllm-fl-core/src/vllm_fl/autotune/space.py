"""The search space: operators with the implementations that each may have. Pure.

An implementation's own options are implementations of their own: a wheel registers one for each
setting that it offers, with a suffix in the id (see ``OpImpl.impl_id``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vllm_fl.dispatch.phases import lay_orders, phase_name, split_choice

Configuration: TypeAlias = Mapping[str, str]
"""Operator -> implementation id, or those of its phases as ``join_choice`` writes them."""

ASKED_ONCE = frozenset({"attention_backend"})
"""Operators that are asked when the model is built, and not called: their time is not known."""


@dataclass(frozen=True)
class Space:
    """What may be chosen.

    Attributes:
        choices: operator -> implementation ids, the default first.
    """

    choices: Mapping[str, tuple[str, ...]]

    @property
    def default(self) -> dict[str, str]:
        """The configuration that is in force without tuning."""
        return {op: impls[0] for op, impls in self.choices.items()}

    @property
    def size(self) -> int:
        """The number of configurations."""
        return math.prod(map(len, self.choices.values()))

    def configurations(self) -> Iterator[dict[str, str]]:
        """Yield every configuration, the default first."""
        for combination in itertools.product(*self.choices.values()):
            yield dict(zip(self.choices, combination, strict=True))

    def changes(self, configuration: Configuration) -> dict[str, str]:
        """Return what a configuration chooses other than the default."""
        return {op: impl for op, impl in configuration.items() if impl != self.choices[op][0]}

    def name(self, configuration: Configuration) -> str:
        """Describe a configuration by its changes."""
        changes = self.changes(configuration)
        return ", ".join(f"{op}={impl}" for op, impl in changes.items()) or "default"


def distance(one: Configuration, other: Configuration) -> int:
    """Return in how many operators two configurations differ."""
    return sum(one[op] != other[op] for op in one)


def needs_restart(
    built: Configuration, wanted: Configuration, live: Mapping[str, Collection[str]]
) -> bool:
    """Whether an engine that was built with one configuration cannot take another one live.

    Args:
        built: what it was built with.
        wanted: what it shall take.
        live: operator that is asked once -> choices among which an engine can change.
    """
    return any(
        built.get(op) != wanted.get(op)
        and not {built.get(op), wanted.get(op)}.issubset(live.get(op, ()))
        for op in ASKED_ONCE
    )


def orders(
    space: Space,
    usable: Mapping[str, Sequence[str]],
    configuration: Configuration,
    named: Configuration | None = None,
) -> dict[str, list[str]]:
    """Return operator (and phase) -> the order tokens, of what a configuration changes.

    The chosen implementation is followed by the other ones, for calls that it does not take.

    Args:
        space: the space.
        usable: operator -> every implementation that may run, in the default order.
        configuration: what is chosen.
        named: choices that are named also where nothing changes.
    """
    changed = {}
    for op, choice in {**(named or {}), **space.changes(configuration)}.items():
        single = [other for other in usable[op] if "" in split_choice(op, other)]
        for phase, impl in split_choice(op, choice).items():
            changed[phase_name(op, phase)] = [
                f"impl:{impl}", *(f"impl:{other}" for other in single if other != impl)
            ]  # fmt: skip
    return changed


def policy(base: Mapping[str, Any], changed: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return a policy's content with some orders changed, strict, so that nothing falls back."""
    return {**base, "strict": True, "per_op_order": lay_orders(base["per_op_order"], changed)}
