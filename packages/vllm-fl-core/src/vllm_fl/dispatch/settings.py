"""The settings: what each is called, which variable sets it, what values it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_fl.dispatch import env
from vllm_fl.dispatch.ops import CATALOGUE
from vllm_fl.dispatch.phases import flat_orders


def _choice(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text.")
    return str(env.PREFER.parse(value))


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not a boolean. Allowed: true, false (without quotes).")
    return value


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return env.parse_list(value)
    if isinstance(value, list) and all(isinstance(name, str) and name.strip() for name in value):
        return tuple(name.strip() for name in value)
    raise ValueError(f"{value!r} is not a list of names. Write [a, b] or 'a,b'.")


def _orders(value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a mapping of operators to order tokens.")
    orders = {}
    for op, order in flat_orders({str(op): order for op, order in value.items()}).items():
        tokens = order.split("|") if isinstance(order, str) else order
        if not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
            raise ValueError(f"{op}: {order!r} is not a list of tokens. Write [vendor, flagos].")
        orders[op] = tuple(token.strip() for token in tokens)
    return orders


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        key: its name, also in YAML.
        variable: the environment variable that sets it (its default is the built-in default).
        parse: turns what YAML holds into a value; raises ValueError with what is allowed. None
            for a switch that only the environment has.
        policy: the argument of SelectionPolicy.from_dict that it gives; "" for none.
        schema: its JSON Schema.
        extends: entries "+name" are added to the value of the layer below.
        cancels: a setting of a layer below that this one takes the place of; in the same layer
            the two contradict each other.
    """

    key: str
    variable: env.EnvVar
    parse: Callable[[Any], Any] | None = None
    policy: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)
    extends: bool = False
    cancels: str = ""

    def as_policy(self, value: Any) -> dict[str, Any]:
        """Return a value as an argument of a policy."""
        return {self.policy: value} if self.policy else {}


@dataclass(frozen=True)
class Value:
    """An effective value and its source, in words a user can act on."""

    value: Any
    source: str


BUILT_IN = "built-in default"
"""The source of values that no layer gives."""

_TOKEN = {"type": "string", "pattern": "^(flagos|vendor|reference|vendor:.+|impl:.+)$"}
_NAME_LIST = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_ORDER: dict[str, Any] = {
    "oneOf": [{"type": "string"}, {"type": "array", "items": _TOKEN, "uniqueItems": True}]
}


def _order_by_phase(phases: tuple[str, ...]) -> dict[str, Any]:
    by_phase = {
        "type": "object",
        "additionalProperties": False,
        "minProperties": 1,
        "properties": dict.fromkeys(phases, _ORDER),
    }
    return {"oneOf": [*_ORDER["oneOf"], by_phase]}


_ORDER_MAP = {
    "type": "object",
    "properties": {op: _order_by_phase(s.phases) for op, s in CATALOGUE.items() if s.phases},
    "additionalProperties": _ORDER,
}
_KINDS = {"enum": ["flagos", "vendor", "reference"]}


def _black_and_white(name: str, white: env.EnvVar, black: env.EnvVar) -> tuple[Setting, Setting]:
    whitelist, blacklist = f"{name}_whitelist", f"{name}_blacklist"
    in_policy = (whitelist, blacklist) if name == "flagos" else ("", "")
    return (
        Setting(whitelist, white, _names, in_policy[0], _NAME_LIST, cancels=blacklist),
        Setting(
            blacklist, black, _names, in_policy[1], _NAME_LIST, extends=True, cancels=whitelist
        ),
    )


SETTINGS: tuple[Setting, ...] = (
    Setting("prefer", env.PREFER, _choice, "prefer", _KINDS),
    Setting("strict", env.STRICT, _boolean, "strict", {"type": "boolean"}),
    Setting("op_backends", env.PER_OP, _orders, "per_op_order", _ORDER_MAP),
    Setting("allow_vendors", env.ALLOW_VENDORS, _names, "allow_vendors", _NAME_LIST),
    Setting("deny_vendors", env.DENY_VENDORS, _names, "deny_vendors", _NAME_LIST),
    *_black_and_white("flagos", env.FLAGOS_WHITELIST, env.FLAGOS_BLACKLIST),
    *_black_and_white("oot", env.OOT_WHITELIST, env.OOT_BLACKLIST),
    Setting("prefer_enabled", env.PREFER_ENABLED),
    Setting("use_flaggems", env.USE_FLAGGEMS),
    Setting("oot_enabled", env.OOT_ENABLED),
)
BY_KEY = {setting.key: setting for setting in SETTINGS}
IN_FILES = {setting.key: setting for setting in SETTINGS if setting.parse is not None}
