"""What dispatch decided, as data for people and programs: explain, the operator table, doctor."""

from __future__ import annotations

import platform as machine
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm_fl.dispatch import discovery, env, state
from vllm_fl.dispatch.backend import Backend
from vllm_fl.dispatch.errors import VllmFLError, nearest
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.ops import CATALOGUE, get_spec
from vllm_fl.dispatch.phases import phase_name, split_name
from vllm_fl.dispatch.policy import Ranking, match_token
from vllm_fl.dispatch.types import OpImpl

_PACKAGES = ("vllm-fl-core", "vllm", "torch", "triton", "flag-gems", "transformers")


def explain(
    manager: OpManager,
    op_name: str,
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return every implementation of an operator with the decision about it.

    Where phases have orders of their own, "phases" holds the decisions of each.

    Args:
        manager: the manager that decides.
        op_name: the operator.
        call: arguments of a call, to see which implementations take them.

    Raises:
        UnknownOperatorError: the operator does not exist.
    """
    spec = get_spec(op_name)
    policy = state.get_policy()
    decided = {
        phase: _decided(manager, ranking, policy.get_per_op_order(op_name, phase))
        for phase, ranking in manager.rank_by_phase(op_name, policy, call).items()
    }
    return {
        "operator": spec.declaration,
        "summary": spec.summary,
        "strict": policy.strict,
        **decided.get("", {"phases": decided}),
    }


def _decided(
    manager: OpManager, ranking: Ranking, own_order: tuple[str, ...] | None
) -> dict[str, Any]:
    """Return the decisions of a ranking under the policy in force."""
    order = own_order or state.get_policy().get_default_order()
    decisions = [
        (
            impl,
            "chosen" if place == 0 else f"fall-back {place}",
            "" if place == 0 else f"outranked by {ranking.order[0].impl_id}",
        )
        for place, impl in enumerate(ranking.order)
    ]
    decisions += [(impl, "refused", decision.reason) for impl, decision in ranking.rejected]
    rows = [
        {
            "impl_id": impl.impl_id,
            "kind": impl.kind.value,
            "wheel": impl.wheel,
            "decision": decision,
            "reason": reason,
            "note": impl.described(),
        }
        for impl, decision, reason in decisions
    ]
    return {
        "chosen": ranking.order[0].impl_id if ranking.order else None,
        "order": list(order),
        "source": _source_of_order(ranking.op_name, order),
        "implementations": rows,
        "unmatched": [
            *_unmatched(order, [impl for impl, *_ in decisions]),
            *manager.unmatched_vendors(),
        ],
    }


def _unmatched(order: tuple[str, ...], impls: list[OpImpl]) -> list[str]:
    """Say which names in an order nothing has: a vendor that is misspelt or not installed."""
    names = {f"impl:{impl.impl_id}" for impl in impls}
    names |= {f"vendor:{impl.vendor}" for impl in impls if impl.vendor is not None}
    return [
        f"No implementation is {token!r}. {nearest(token, names)}"
        for token in order
        if ":" in token and not any(match_token(impl, token) for impl in impls)
    ]


def _source_of_order(name: str, order: tuple[str, ...]) -> str:
    """Say where the order of an operator, or one in a phase, comes from; "" if from Python."""
    config = state.current_config()
    orders = config["op_backends"]
    for key in (name, split_name(name)[0]):
        if key in orders:
            return config.order_sources[key] if tuple(orders[key]) == order else ""
    return config.values["prefer"].source if config.policy().get_default_order() == order else ""


def operator_table(manager: OpManager) -> list[dict[str, Any]]:
    """Return, for each operator, what is chosen for it and whatever else ran, with the calls.

    An operator whose phases have orders of their own has rows for each, named ``operator.phase``.
    Calls are counted only while ``manager.count_calls`` is on.
    """
    manager.ensure_initialized()
    failed = manager.get_failed_impls()
    rows = []
    for op_name in CATALOGUE:
        chosen_for: Mapping[str, OpImpl | None] = manager.usage.serving(op_name) or {
            phase: next(iter(ranking.order), None)
            for phase, ranking in manager.rank_by_phase(op_name).items()
        }
        calls = manager.counters.calls
        for phase, choice in chosen_for.items():
            for impl in manager.registry.get_implementations(op_name):
                chosen = impl == choice
                if chosen or calls[op_name, impl.impl_id]:
                    rows.append(
                        {
                            "op": phase_name(op_name, phase),
                            "implementation": impl.impl_id,
                            "wheel": impl.distribution,
                            "version": impl.version,
                            "calls": calls[op_name, impl.impl_id],
                            "chosen": chosen,
                            "failed": failed.get(op_name, {}).get(impl.impl_id, ""),
                        }
                    )
    return rows


def backends() -> list[dict[str, Any]]:
    """Return one row a backend that discovery found."""
    return [
        {
            "name": record.name,
            "wheel": record.wheel,
            "source": record.source,
            "usable": record.decision.accepted,
            "reason": record.decision.reason,
            "details": record.details,
            "problems": list(record.problems),
            "device": record.device.name if record.device is not None else None,
            "facts": _facts(record.backend),
        }
        for record in discovery.get_discovered_plugins()
    ]


def _facts(backend: Backend | None) -> dict[str, object]:
    """Return what a backend has to tell; one that cannot loses this report alone."""
    try:
        return dict(backend.facts()) if backend is not None else {}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def doctor(manager: OpManager) -> dict[str, Any]:
    """Return everything that a report of a fault needs; holds no secrets."""
    report: dict[str, Any] = {
        "python": sys.version.split()[0],
        "system": f"{machine.system()} {machine.machine()}",
        "packages": {name: _installed(name) for name in _PACKAGES},
        "environment": env.texts(),
        "unknown_variables": dict(env.unknown_variables()),
        "foreign_variables": list(env.foreign_variables()),
    }
    try:
        manager.ensure_initialized()
        choice = state.current_device()
        report["backends"] = backends()
        report["device"] = {
            "backend": choice.backend,
            "refused": {name: d.reason for name, d in choice.claims.items() if not d},
        }
        config = state.current_config()
        report["config"] = {key: vars(value) for key, value in config.values.items()}
        report["unmatched"] = manager.unmatched_vendors()
        report["operators"] = operator_table(manager)
        rankings = [r for op in CATALOGUE for r in manager.rank_by_phase(op).values()]
        report["operators_without_implementation"] = {
            r.op_name: {impl.impl_id: no.reason for impl, no in r.rejected}
            for r in rankings
            if not r.order
        }
    except VllmFLError as error:
        report["error"] = str(error)
    return report


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
