"""The effective configuration: five layers, and where each value came from.

Highest first: the file VLLM_FL_CONFIG (a complete override), environment variables item by item,
a tuned configuration for the model, the defaults file of the platform, built-in defaults.

A higher layer's general wish goes before a lower one's particular ones: see :func:`_make_way`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_fl.dispatch import env
from vllm_fl.dispatch.config_file import parse_file, read, read_resource
from vllm_fl.dispatch.errors import ConfigError, UnknownOperatorError
from vllm_fl.dispatch.phases import lay_orders
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl.dispatch.settings import BUILT_IN, BY_KEY, IN_FILES, SETTINGS, Value
from vllm_fl.dispatch.types import YES, Decision
from vllm_fl.dispatch.unused import narrowed, unused


@dataclass(frozen=True)
class Config:
    """The effective configuration: key -> value with its source.

    Attributes:
        values: every setting.
        ignored: set environment variables that the file of VLLM_FL_CONFIG overrides.
        defaults: what the platform's defaults file gives.
        order_sources: name in ``op_backends`` -> the source of its order.
        unused: a sentence about each thing that the user sets in vain.
        narrowed: a sentence about each thing that acts on less than it could, or not at all, since
            the user has switched something off; no fault, also under strict.
    """

    values: Mapping[str, Value]
    ignored: tuple[str, ...] = ()
    defaults: Mapping[str, Value] = field(default_factory=dict)
    order_sources: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    narrowed: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.values[key].value

    def is_of_platform(self, name: str) -> bool:
        """Whether an order in ``op_backends``, of an operator or one in a phase, is a default."""
        orders = self.defaults.get("op_backends")
        return orders is not None and self.order_sources.get(name) == orders.source

    def is_default(self, key: str) -> bool:
        """Whether a setting comes from the platform's defaults, or from the built-in ones."""
        of_platform = {value.source for value in self.defaults.values()}
        return self.values[key].source in {BUILT_IN, *of_platform}

    def names(self, op_name: str) -> bool:
        """Whether an operator has an order, for one phase at least, that is not a default."""
        return any(
            name.partition(".")[0] == op_name and not self.is_of_platform(name)
            for name in self["op_backends"]
        )

    def policy(self) -> SelectionPolicy:
        """Return the policy that the values describe.

        Raises:
            ConfigError: the values contradict each other.
        """
        arguments: dict[str, Any] = {}
        for setting in SETTINGS:
            arguments |= setting.as_policy(self[setting.key])
        if not self["prefer_enabled"] or self["use_flaggems"] is False:
            arguments["flagos_whitelist"] = ()
        try:
            return SelectionPolicy.from_dict(**arguments)
        except ConfigError as error:
            sources = {value.source for value in self.values.values()} - {BUILT_IN}
            raise ConfigError(f"{error} (from {', '.join(sorted(sources))})") from error

    def oot_decision(self, op_name: str) -> Decision:
        """Whether the vLLM layer of an operator is replaced by a dispatched one, and why not."""
        for switch in ("prefer_enabled", "oot_enabled"):
            if not self[switch]:
                return Decision.no(f"{self.values[switch].source} is off")
        whitelist, blacklist = self["oot_whitelist"], self["oot_blacklist"]
        named = self.is_default("oot_whitelist") and self.names(op_name)
        if whitelist is not None and op_name not in whitelist and not named:
            listed = f"has only {', '.join(whitelist)}" if whitelist else "is empty"
            return Decision.no(f"oot_whitelist {listed}")
        if op_name in blacklist:
            return Decision.no(f"{op_name} is in oot_blacklist")
        return YES


def load(defaults: str | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Return the effective configuration.

    Args:
        defaults: the platform's defaults file, ``"package:file.yaml"``.
        environ: the environment; None for the process's.

    Raises:
        ConfigError: a source holds something that is not allowed.
    """
    values = {s.key: Value(s.variable.default, BUILT_IN) for s in SETTINGS}
    variables = {
        s.key: Value(s.variable.read(environ), s.variable.name)
        for s in SETTINGS
        if s.variable.is_set(environ)
    }
    path = env.CONFIG.read(environ)
    if path is not None:
        source = f"{path} ({env.CONFIG.name})"
        switches = {key: value for key, value in variables.items() if key not in IN_FILES}
        of_file = parse_file(read(path), source)
        _lay(values, of_file)
        _lay(values, switches)
        overridden = [BY_KEY[key].variable.name for key in variables if key in IN_FILES]
        overridden += [v.name for v in (env.TUNED_DIR, env.TUNED_FILE) if v.is_set(environ)]
        return Config(
            values,
            tuple(sorted(overridden)),
            order_sources=_order_sources(values),
            unused=unused(of_file),
            narrowed=_switched_off(of_file, switches),
        )
    of_platform: dict[str, Value] = {}
    if defaults is not None:
        text, where = read_resource(defaults)
        of_platform = parse_file(text, f"{where} (platform defaults)")
        _lay(values, of_platform)
    tuned_file = env.TUNED_FILE.read(environ)
    tuned: dict[str, Value] = {}
    if tuned_file is not None:
        tuned = parse_file(read(tuned_file), f"{tuned_file} (tuned)")
        _lay(values, tuned)
    _lay(values, variables)
    # A tuned file is complete: it repeats what it leaves as the platform has it.
    sources = {**_order_sources(tuned), **_order_sources(of_platform, of=values)}
    sources |= _order_sources(variables)
    named = values["op_backends"].value
    return Config(
        values,
        defaults=of_platform,
        order_sources={n: s for n, s in sources.items() if n in named},
        unused=unused(variables),
        narrowed=(
            *narrowed(variables),
            *_switched_off({k: tuned[k] for k in ("op_backends",) if k in tuned}, variables),
        ),
    )


def _switched_off(of_file: Mapping[str, Value], switches: Mapping[str, Value]) -> tuple[str, ...]:
    """Say what of a file variables switch off, that it cannot know of."""
    known = {*unused(of_file), *unused(switches), *narrowed(switches)}
    together = {**of_file, **{key: v for key, v in switches.items() if key not in IN_FILES}}
    return tuple(text for text in (*unused(together), *narrowed(together)) if text not in known)


def _order_sources(
    layer: Mapping[str, Value], of: Mapping[str, Value] | None = None
) -> dict[str, str]:
    """Return name -> source of the orders of a layer, or of those that are the same in another."""
    if "op_backends" not in layer:
        return {}
    orders, source = layer["op_backends"].value, layer["op_backends"].source
    same = orders if of is None else of["op_backends"].value
    return {name: source for name, order in orders.items() if same.get(name) == order}


def _lay(values: dict[str, Value], upper: Mapping[str, Value]) -> None:
    """Lay the values of one source over ``values``; orders of operators one by one.

    Raises:
        ConfigError: it holds a white- and a blacklist of the same kind, or a list with some
            entries to add and some to replace.
    """
    _make_way(values, upper)
    for key, new in upper.items():
        setting = BY_KEY[key]
        if setting.cancels in upper:
            raise ConfigError(
                f"{new.source}: {key} and {setting.cancels} contradict each other; give one "
                f"({upper[setting.cancels].source} gives the other)."
            )
        if setting.extends and new.value:
            new = _extended(key, values[key], new)
        try:
            SelectionPolicy.from_dict(**setting.as_policy(new.value))
        except (ConfigError, UnknownOperatorError) as error:
            raise ConfigError(f"{new.source}: {key}: {error}") from error
        if key == "op_backends" and values[key].value:
            orders = lay_orders(values[key].value, new.value)
            source = f"{new.source}, over {values[key].source}"
            new = Value({op: tuple(order) for op, order in orders.items()}, source)
        values[key] = new
        if setting.cancels:
            default = BY_KEY[setting.cancels].variable.default
            if values[setting.cancels].value != default:
                values[setting.cancels] = Value(default, f"cancelled by {new.source}")


def _make_way(values: dict[str, Value], upper: Mapping[str, Value]) -> None:
    """Take out of ``values`` what a higher layer's preference, or its orders, go before.

    A preference is for every operator: orders and lists of layers below it do not count. An order
    takes its operator off the blacklist of layers below it.
    """
    if "prefer" in upper:
        for key in ("op_backends", "oot_whitelist", "oot_blacklist"):
            default = BY_KEY[key].variable.default
            if values[key].value != default:
                values[key] = Value(default, f"overruled by {upper['prefer'].source}")
    if "op_backends" in upper:
        orders, kept = upper["op_backends"], values["oot_blacklist"]
        named = {name.partition(".")[0] for name in orders.value}
        if not named.isdisjoint(kept.value):
            left = tuple(name for name in kept.value if name not in named)
            source = f"{kept.source}, without what {orders.source} orders"
            values["oot_blacklist"] = Value(left, source)


def _extended(key: str, lower: Value, upper: Value) -> Value:
    added = [name.startswith("+") for name in upper.value]
    if not any(added):
        return upper
    if not all(added):
        raise ConfigError(
            f"{upper.source}: {key}={','.join(upper.value)!r} mixes names that replace the list "
            "and +names that add to it; write all or none with +."
        )
    names = dict.fromkeys((*lower.value, *(name[1:] for name in upper.value)))
    return Value(tuple(names), f"{lower.source}, extended by {upper.source}")
