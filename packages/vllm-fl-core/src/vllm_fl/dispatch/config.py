"""The configuration: one schema, five layers, and where each effective value came from.

Highest first: the file VLLM_FL_CONFIG (a complete override), environment variables item by item,
a tuned configuration for the model, the defaults file of the platform, built-in defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import env, tuned
from vllm_fl.dispatch.errors import ConfigError, UnknownOperatorError, nearest
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl.dispatch.types import YES, Decision

if TYPE_CHECKING:
    from pathlib import Path


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
    for op, order in value.items():
        tokens = order.split("|") if isinstance(order, str) else order
        if not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
            raise ValueError(f"{op}: {order!r} is not a list of tokens. Write [vendor, flagos].")
        orders[str(op)] = tuple(token.strip() for token in tokens)
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


BUILT_IN = "built-in default"
"""The source of values that no layer gives."""

_TOKEN = {"type": "string", "pattern": "^(flagos|vendor|reference|vendor:.+|impl:.+)$"}
_NAME_LIST = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_ORDER_MAP = {
    "type": "object",
    "additionalProperties": {"oneOf": [{"type": "string"}, {"type": "array", "items": _TOKEN}]},
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
_BY_KEY = {setting.key: setting for setting in SETTINGS}
_IN_FILES = {setting.key: setting for setting in SETTINGS if setting.parse is not None}


@dataclass(frozen=True)
class Value:
    """An effective value and its source, in words a user can act on."""

    value: Any
    source: str


@dataclass(frozen=True)
class Config:
    """The effective configuration: key -> value with its source.

    Attributes:
        values: every setting.
        ignored: set environment variables that the file of VLLM_FL_CONFIG overrides.
    """

    values: Mapping[str, Value]
    ignored: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.values[key].value

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
        if whitelist is not None and op_name not in whitelist:
            return Decision.no(f"oot_whitelist has only {', '.join(whitelist)}")
        if op_name in blacklist:
            return Decision.no(f"{op_name} is in oot_blacklist")
        return YES


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "vllm-fl configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{
                key: {"description": setting.variable.doc, **setting.schema}
                for key, setting in _IN_FILES.items()
            },
            tuned.KEY: tuned.schema(),
        },
    }


def parse_file(text: str, source: str) -> dict[str, Value]:
    """Parse and check the content of a configuration file.

    What a tuned configuration says about itself is checked and left out.

    Raises:
        ConfigError: not YAML, not a mapping, an unknown key, or a value that is not allowed.
    """
    values = {}
    for key, raw in _mapping(text, source).items():
        if key == tuned.KEY:
            tuned.check(raw, source)
            continue
        if key not in _IN_FILES:
            known = (*_IN_FILES, tuned.KEY)
            raise ConfigError(f"{source}: unknown key {key!r}. {nearest(str(key), known)}")
        parse = _IN_FILES[key].parse
        assert parse is not None
        try:
            values[key] = Value(parse(raw), source)
        except ValueError as error:
            raise ConfigError(f"{source}: {key}: {error}") from error
    return values


def read_block(path: Path) -> dict[str, Any] | None:
    """Return what a tuned configuration says about itself; None for another configuration.

    Raises:
        ConfigError: the file is not a configuration.
    """
    text = _read(path)
    parse_file(text, str(path))
    return _mapping(text, str(path)).get(tuned.KEY)


def read_blocks(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the tuned configurations of a folder with what they say about themselves.

    Raises:
        ConfigError: a YAML file there is not a configuration.
    """
    for path in sorted(folder.glob("*.yaml")):
        block = read_block(path)
        if block is not None:
            yield path, block


def _mapping(text: str, source: str) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"{source} is not YAML: {error}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{source} must hold a mapping of settings, not {content!r}.")
    return content


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def read_resource(reference: str) -> tuple[str, str]:
    """Return (text, path) of a file inside a package, named ``"package:file"``, not importing it.

    Raises:
        ConfigError: there is no such package or file.
    """
    import importlib.util
    from pathlib import Path

    package, _, name = reference.partition(":")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / name
        if path.is_file():
            return _read(path), str(path)
    raise ConfigError(f"The defaults file {reference!r} does not exist; reinstall its wheel.")


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
        switches = {key: value for key, value in variables.items() if key not in _IN_FILES}
        _lay(values, parse_file(_read(path), source))
        _lay(values, switches)
        overridden = [_BY_KEY[key].variable.name for key in variables if key in _IN_FILES]
        overridden += [v.name for v in (env.TUNED_DIR, env.TUNED_FILE) if v.is_set(environ)]
        return Config(values, tuple(sorted(overridden)))
    if defaults is not None:
        text, where = read_resource(defaults)
        _lay(values, parse_file(text, f"{where} (platform defaults)"))
    tuned_file = env.TUNED_FILE.read(environ)
    if tuned_file is not None:
        _lay(values, parse_file(_read(tuned_file), f"{tuned_file} (tuned)"))
    _lay(values, variables)
    return Config(values)


def _lay(values: dict[str, Value], upper: Mapping[str, Value]) -> None:
    """Lay the values of one source over ``values``.

    Raises:
        ConfigError: it holds a white- and a blacklist of the same kind, or a list with some
            entries to add and some to replace.
    """
    for key, new in upper.items():
        setting = _BY_KEY[key]
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
        values[key] = new
        if setting.cancels:
            default = _BY_KEY[setting.cancels].variable.default
            if values[setting.cancels].value != default:
                values[setting.cancels] = Value(default, f"cancelled by {new.source}")


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
