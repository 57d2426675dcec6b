"""Operators that may differ by phase: how a choice for one phase is named and ordered. Pure.

A step of the engine is in one phase: in ``decode`` every request has one new token, anything else
is ``prefill``. An operator whose :class:`OpSpec` lists phases may have an order of its own in each,
under the name ``operator.phase``; a phase without one has the operator's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_fl.dispatch.errors import ConfigError, nearest
from vllm_fl.dispatch.ops import CATALOGUE, PHASES, get_spec

DECODE, PREFILL = PHASES


def phase_name(op_name: str, phase: str) -> str:
    """Return the name of an operator in a phase; the operator's own for the phase ""."""
    return f"{op_name}.{phase}" if phase else op_name


def split_name(name: str) -> tuple[str, str]:
    """Return the operator and the phase that a name is for; the phase is "" for all.

    Raises:
        UnknownOperatorError: there is no such operator.
        ConfigError: the operator has no such phase.
    """
    op_name, separator, phase = name.partition(".")
    spec = get_spec(op_name)
    if not separator:
        return op_name, ""
    if not spec.phases:
        having = ", ".join(op for op, other in CATALOGUE.items() if other.phases)
        raise ConfigError(
            f"{op_name} cannot differ by phase (given: {name!r}): one compiled graph serves decode "
            f"and prefill. Give one order, {op_name}: [flagos]. By phase: {having}."
        )
    if phase not in spec.phases:
        raise ConfigError(f"{op_name} has no phase {phase!r}. {nearest(phase, spec.phases)}")
    return op_name, phase


def flat_orders(orders: Mapping[str, Any]) -> dict[str, Any]:
    """Return orders by name, what is a mapping of phases to orders taken apart.

    ``{"op": {"decode": a, "prefill": b}}`` becomes ``{"op.decode": a, "op.prefill": b}``.

    Raises:
        ConfigError: a phase is given twice, or a mapping is empty.
    """
    flat: dict[str, Any] = {}
    for op_name, order in orders.items():
        parts = {op_name: order}
        if isinstance(order, Mapping):
            parts = {phase_name(op_name, str(phase)): of for phase, of in order.items()}
            if not parts:
                raise ConfigError(f"{op_name}: no phase is given. Write {{decode: [flagos]}}.")
        for name, of_phase in parts.items():
            if name in flat:
                raise ConfigError(f"The order of {name} is given twice.")
            flat[name] = of_phase
    return flat


def nested_orders(flat: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """Return orders as a configuration file has them: the reverse of :func:`flat_orders`.

    An operator with an order for all phases and one for some keeps the names as they are.
    """
    nested: dict[str, Any] = {}
    for name, order in flat.items():
        op_name, phase = split_name(name)
        if not phase or op_name in flat:
            nested[name] = list(order)
        else:
            nested.setdefault(op_name, {})[phase] = list(order)
    return nested


def lay_orders(
    lower: Mapping[str, Iterable[str]], upper: Mapping[str, Iterable[str]]
) -> dict[str, list[str]]:
    """Return the orders of ``lower`` with those in ``upper`` over them.

    An order of an operator, or orders of all its phases, replace all that ``lower`` has for it; an
    order of one phase replaces that phase's alone.
    """
    names = {split_name(name)[0] for name in upper}
    whole = {
        op for op in names
        if op in upper or all(phase_name(op, phase) in upper for phase in get_spec(op).phases)
    }  # fmt: skip
    kept = {name: order for name, order in lower.items() if split_name(name)[0] not in whole}
    return {name: list(order) for name, order in {**kept, **upper}.items()}


def join_choice(by_phase: Mapping[str, str]) -> str:
    """Return one text for an operator's implementations: phase -> implementation id.

    It is the id itself where all phases have the same one.
    """
    if len(set(by_phase.values())) == 1:
        return next(iter(by_phase.values()))
    return "+".join(f"{phase}:{impl_id}" for phase, impl_id in by_phase.items())


def split_choice(op_name: str, choice: str) -> dict[str, str]:
    """Return phase -> implementation id of what :func:`join_choice` wrote; phase "" for all."""
    phases = get_spec(op_name).phases
    parts = re.fullmatch(r"\+".join(f"{phase}:(.+)" for phase in phases), choice)
    return dict(zip(phases, parts.groups(), strict=True)) if parts else {"": choice}
