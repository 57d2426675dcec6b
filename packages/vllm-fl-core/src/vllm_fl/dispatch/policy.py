"""Which implementation of an operator runs: the policy and the pure ranking.

A policy is data; :func:`rank` is a function of (implementations, policy, availability) and reads
nothing else, so that the choice for any chip can be computed and tested on any machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vllm_fl.dispatch import discovery
from vllm_fl.dispatch.errors import (
    ConfigError,
    NoImplementationError,
    UnknownOperatorError,
    nearest,
)
from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.phases import flat_orders, phase_name, split_name
from vllm_fl.dispatch.types import YES, BackendImplKind, Decision, OpImpl

PREFER_DEFAULT = BackendImplKind.DEFAULT.value
PREFER_VENDOR = BackendImplKind.VENDOR.value
PREFER_REFERENCE = BackendImplKind.REFERENCE.value
_KINDS = tuple(kind.value for kind in BackendImplKind)
_ORDERS: Mapping[str, tuple[str, ...]] = {
    PREFER_DEFAULT: (PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE),
    PREFER_VENDOR: (PREFER_VENDOR, PREFER_DEFAULT, PREFER_REFERENCE),
    PREFER_REFERENCE: (PREFER_REFERENCE, PREFER_DEFAULT, PREFER_VENDOR),
}


def check_token(token: str) -> str:
    """Return ``token`` if it is an order token.

    Raises:
        ConfigError: it is none of flagos, vendor, vendor:NAME, reference, impl:ID.
    """
    prefix, separator, name = token.partition(":")
    if token in _KINDS or (separator and name and prefix in ("vendor", "impl")):
        return token
    advice = nearest(token, (*_KINDS, "vendor:NAME", "impl:ID"))
    raise ConfigError(f"Unknown order token {token!r}. {advice}")


def match_token(impl: OpImpl, token: str) -> bool:
    """Whether an order token names this implementation."""
    prefix, separator, name = token.partition(":")
    if not separator:
        return impl.kind.value == token
    if prefix == "vendor":
        return impl.kind is BackendImplKind.VENDOR and impl.vendor == name
    return prefix == "impl" and impl.impl_id == name


def name_set(setting: str, names: Iterable[str]) -> frozenset[str]:
    """Return names as a set.

    Raises:
        ConfigError: a text, which is a list of letters, or something that is not a name.
    """
    found = () if isinstance(names, str) else tuple(names)
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in found):
        raise ConfigError(f"{setting}={names!r} is not a list of names. Write ['a', 'b'].")
    return frozenset(found)


def _check_listed(name: str) -> None:
    """Check a name of the flagos lists: an operator, or a name that an installed backend knows.

    Raises:
        UnknownOperatorError: it is neither.
    """
    try:
        get_spec(name)
    except UnknownOperatorError as error:
        decision = discovery.knows_listed_name(name)
        if not decision:
            raise UnknownOperatorError(f"{error} {decision.reason}".strip()) from None


@dataclass(frozen=True)
class SelectionPolicy:
    """How implementations are chosen. Immutable; make one with :meth:`from_dict`.

    Attributes:
        prefer: the kind that is tried first for operators without an order of their own.
        strict: the first error raises; nothing falls back.
        per_op_order: (operator, order tokens) pairs; for these operators only what is listed
            may run. The operator may be one in a phase, as in ``attention_backend.decode``.
        deny_vendors: vendors that may not run.
        allow_vendors: the only vendors that may run; None means any.
        flagos_whitelist: the only operators that implementations of kind DEFAULT may run; None
            means any, an empty set none. Here and in the next one a name may also be one that
            only a backend knows, as flag_gems' ATen operators are.
        flagos_blacklist: operators that they may not run.
    """

    prefer: str = PREFER_DEFAULT
    strict: bool = False
    per_op_order: tuple[tuple[str, tuple[str, ...]], ...] = ()
    deny_vendors: frozenset[str] = frozenset()
    allow_vendors: frozenset[str] | None = None
    flagos_whitelist: frozenset[str] | None = None
    flagos_blacklist: frozenset[str] = frozenset()
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        if self.prefer not in _ORDERS:
            raise ConfigError(f"prefer={self.prefer!r}. {nearest(str(self.prefer), _ORDERS)}")
        for name in ("deny_vendors", "allow_vendors", "flagos_whitelist", "flagos_blacklist"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, name_set(name, getattr(self, name)))
        for name in (*self.flagos_blacklist, *(self.flagos_whitelist or ())):
            _check_listed(name)
        if not isinstance(self.strict, bool):
            raise ConfigError(f"strict={self.strict!r} is not a boolean. Allowed: true, false.")
        for op, order in self.per_op_order:
            split_name(op)
            if not order:
                raise ConfigError(
                    f"The order of operator {op!r} is empty; name at least one token."
                )
            for place, token in enumerate(order):
                check_token(token)
                if token in order[:place]:
                    raise ConfigError(
                        f"The order of operator {op!r} has {token!r} twice: {' > '.join(order)}. "
                        "Name each token once."
                    )
        both = self.deny_vendors & (self.allow_vendors or frozenset())
        if both:
            raise ConfigError(f"Vendors both allowed and denied: {', '.join(sorted(both))}.")
        content = tuple(getattr(self, f.name) for f in fields(self) if f.compare)
        object.__setattr__(self, "_hash", hash(content))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as arguments: the hash of a text is another one in another process."""
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.init)

    @classmethod
    def from_dict(
        cls,
        prefer: str = PREFER_DEFAULT,
        strict: bool = False,
        per_op_order: Mapping[str, Iterable[str] | Mapping[str, Iterable[str]]] | None = None,
        deny_vendors: Iterable[str] = (),
        allow_vendors: Iterable[str] | None = None,
        flagos_whitelist: Iterable[str] | None = None,
        flagos_blacklist: Iterable[str] = (),
    ) -> SelectionPolicy:
        """Make a policy from ordinary containers.

        Raises:
            ConfigError: a value is not allowed; UnknownOperatorError: an operator does not exist.
        """
        orders = sorted(flat_orders(per_op_order or {}).items())
        for op, order in orders:
            if isinstance(order, str):
                raise ConfigError(
                    f"The order of {op!r} is {order!r}, not a list. Write [{order!r}]."
                )
        return cls(
            prefer=prefer,
            strict=strict,
            per_op_order=tuple((op, tuple(order)) for op, order in orders),
            deny_vendors=deny_vendors,  # type: ignore[arg-type]  # __post_init__ makes them sets
            allow_vendors=allow_vendors,  # type: ignore[arg-type]
            flagos_whitelist=flagos_whitelist,  # type: ignore[arg-type]
            flagos_blacklist=flagos_blacklist,  # type: ignore[arg-type]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of :meth:`from_dict`, as JSON-ready containers."""
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        content["per_op_order"] = {op: list(order) for op, order in self.per_op_order}
        return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in content.items()}

    @property
    def per_op_order_dict(self) -> dict[str, tuple[str, ...]]:
        """The per-operator orders as a dictionary."""
        return dict(self.per_op_order)

    def get_per_op_order(self, op_name: str, phase: str = "") -> tuple[str, ...] | None:
        """The operator's own order in a phase, else that for all phases, or None."""
        orders = self.per_op_order_dict
        return orders.get(phase_name(op_name, phase), orders.get(op_name))

    def phases(self, op_name: str) -> tuple[str, ...]:
        """The operator's phases if one of them has an order of its own, else "" for all alike."""
        orders, phases = self.per_op_order_dict, get_spec(op_name).phases
        apart = any(phase_name(op_name, phase) in orders for phase in phases)
        return phases if apart else ("",)

    def get_default_order(self) -> tuple[str, ...]:
        """The order of operators that have none of their own."""
        return _ORDERS[self.prefer]

    def is_vendor_allowed(self, vendor: str) -> bool:
        """Whether a vendor's implementations may run."""
        return self.vendor_decision(vendor).accepted

    def vendor_decision(self, vendor: str) -> Decision:
        """Whether a vendor's implementations may run, and why not."""
        if vendor in self.deny_vendors:
            return Decision.no(f"vendor {vendor} is denied")
        if self.allow_vendors is not None and vendor not in self.allow_vendors:
            allowed = ", ".join(sorted(self.allow_vendors)) or "none"
            return Decision.no(f"vendor {vendor} is not allowed (allowed: {allowed})")
        return YES

    def unmatched_vendors(self, vendors: Iterable[str]) -> list[str]:
        """Say which vendors are allowed or denied, and not among ``vendors``."""
        named = {"allow_vendors": self.allow_vendors or (), "deny_vendors": self.deny_vendors}
        known = frozenset(vendors)
        return [
            f"{setting}: no backend here is of the vendor {name!r}. {nearest(name, known)}"
            for setting, names in named.items()
            for name in sorted(frozenset(names) - known)
        ]

    def flagos_decision(self, op_name: str) -> Decision:
        """Whether an implementation of kind DEFAULT may run the operator, and why not."""
        if self.flagos_whitelist is not None and op_name not in self.flagos_whitelist:
            listed = ", ".join(sorted(self.flagos_whitelist))
            return Decision.no(
                f"flagos_whitelist has only {listed}" if listed else "the default backend is off"
            )
        if op_name in self.flagos_blacklist:
            return Decision.no(f"{op_name} is in flagos_blacklist")
        return YES

    def fingerprint(self) -> str:
        """A short hash of the content, equal in every process."""
        import hashlib  # loads OpenSSL

        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Ranking:
    """The outcome for one operator.

    Attributes:
        op_name: the operator, with its phase if it was ranked for one.
        order: the implementations that may run, first choice first.
        rejected: the others with the reason for each.
    """

    op_name: str
    order: tuple[OpImpl, ...]
    rejected: tuple[tuple[OpImpl, Decision], ...]

    @property
    def summary(self) -> str:
        """One line: what is chosen, what follows, and what is refused for which reason."""
        first, *rest = self.order
        line = f"{self.op_name} -> {first.impl_id} ({first.wheel or 'by hand'})"
        if rest:
            line += f"; then {', '.join(impl.impl_id for impl in rest)}"
        if self.rejected:
            refused = "; ".join(f"{impl.impl_id}: {no.reason}" for impl, no in self.rejected)
            line += f"; refused: {refused}"
        return line

    def require(self, hint: str = "") -> tuple[OpImpl, ...]:
        """Return the order.

        Raises:
            NoImplementationError: it is empty; one line an implementation says why.
        """
        if self.order:
            return self.order
        lines = [f"No implementation of {self.op_name!r} may run."]
        lines += [f"  {impl.impl_id}: {decision.reason}" for impl, decision in self.rejected]
        if not self.rejected:
            lines.append("  None is installed.")
        raise NoImplementationError("\n".join(filter(None, (*lines, hint))))


def rank(
    op_name: str,
    impls: Iterable[OpImpl],
    policy: SelectionPolicy,
    quarantined: Mapping[str, str],
    availability: Callable[[OpImpl], Decision] = OpImpl.availability,
    arch: int | None = None,
    arguments: Callable[[OpImpl], Decision] = lambda impl: YES,
    phase: str = "",
) -> Ranking:
    """Order an operator's implementations under a policy. Pure but for what it is given to ask.

    The order tokens decide first, then priority (higher first), then the id, so the result does
    not depend on the order of registration.

    Args:
        op_name: the operator.
        impls: its implementations.
        policy: the policy.
        quarantined: implementation id -> why it failed earlier.
        availability: asked only for implementations that the policy admits.
        arch: the device's architecture as 10 * major + minor; None if it has no such number.
        arguments: asked last, whether an implementation takes the arguments of a certain call.
        phase: the phase of the engine's steps; "" for an operator that has none.
    """
    name = phase_name(op_name, phase)
    own_order = policy.get_per_op_order(op_name, phase)
    tokens = own_order or policy.get_default_order()
    accepted: list[tuple[int, int, str, OpImpl]] = []
    rejected: list[tuple[OpImpl, Decision]] = []
    for impl in sorted(impls, key=lambda impl: impl.impl_id):
        place = next((i for i, token in enumerate(tokens) if match_token(impl, token)), None)
        decision = YES
        if place is None:
            decision = Decision.no(f"the order for {name} is {' > '.join(tokens)}")
        if decision and impl.kind is BackendImplKind.DEFAULT:
            decision = policy.flagos_decision(op_name)
        if decision and impl.vendor is not None:
            decision = policy.vendor_decision(impl.vendor)
        if decision and impl.impl_id in quarantined:
            decision = Decision.no(f"out since it failed: {quarantined[impl.impl_id]}")
        if decision and impl.min_arch is not None and (arch is None or arch < impl.min_arch):
            decision = Decision.no(
                f"it needs architecture {impl.min_arch}, this device has {arch or 'none'}"
            )
        if decision:
            decision = availability(impl)
        if decision:
            decision = arguments(impl)
        if decision:
            accepted.append((place or 0, -(impl.priority or 0), impl.impl_id, impl))
        else:
            rejected.append((impl, decision))
    accepted.sort(key=lambda entry: entry[:3])
    return Ranking(name, tuple(entry[3] for entry in accepted), tuple(rejected))
