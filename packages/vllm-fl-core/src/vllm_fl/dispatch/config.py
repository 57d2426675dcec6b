"""The configuration: one schema, four layers, and where each effective value came from.

Highest first: the file VLLM_FL_CONFIG (a complete override), environment variables item by item,
the defaults file of the platform, built-in defaults.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_fl.dispatch import env
from vllm_fl.dispatch.errors import ConfigError, nearest
from vllm_fl.dispatch.policy import SelectionPolicy


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
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
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
    """One key of the configuration file.

    Attributes:
        key: its name in YAML.
        variable: the environment variable that sets it (its default is the built-in default).
        parse: turns what YAML holds into a value; raises ValueError with what is allowed.
        schema: its JSON Schema.
    """

    key: str
    variable: env.EnvVar
    parse: Callable[[Any], Any]
    schema: Mapping[str, Any]


_TOKEN_PATTERN = "^(flagos|vendor|reference|vendor:.+|impl:.+)$"
_NAME_LIST: Mapping[str, Any] = {
    "oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
}
SETTINGS: tuple[Setting, ...] = (
    Setting("prefer", env.PREFER, _choice, {"enum": ["flagos", "vendor", "reference"]}),
    Setting("strict", env.STRICT, _boolean, {"type": "boolean"}),
    Setting("allow_vendors", env.ALLOW_VENDORS, _names, _NAME_LIST),
    Setting("deny_vendors", env.DENY_VENDORS, _names, _NAME_LIST),
    Setting(
        "op_backends",
        env.PER_OP,
        _orders,
        {
            "type": "object",
            "additionalProperties": {
                "oneOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string", "pattern": _TOKEN_PATTERN}},
                ]
            },
        },
    ),
)


@dataclass(frozen=True)
class Value:
    """An effective value and its source, in words a user can act on."""

    value: Any
    source: str


@dataclass(frozen=True)
class Config:
    """The effective configuration: key -> value with its source."""

    values: Mapping[str, Value]

    def __getitem__(self, key: str) -> Any:
        return self.values[key].value

    def policy(self) -> SelectionPolicy:
        """Return the policy that the values describe.

        Raises:
            ConfigError: the values contradict each other.
        """
        return SelectionPolicy.from_dict(
            prefer=self["prefer"],
            strict=self["strict"],
            per_op_order=self["op_backends"],
            deny_vendors=self["deny_vendors"],
            allow_vendors=self["allow_vendors"],
        )


def parse_file(text: str, source: str) -> dict[str, Value]:
    """Parse and check the content of a configuration file.

    Raises:
        ConfigError: not YAML, not a mapping, an unknown key, or a value that is not allowed.
    """
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{source} must hold a mapping of settings, not {content!r}.")
    settings = {setting.key: setting for setting in SETTINGS}
    values = {}
    for key, raw in content.items():
        if key not in settings:
            raise ConfigError(f"{source}: unknown key {key!r}. {nearest(str(key), settings)}")
        try:
            values[key] = Value(settings[key].parse(raw), source)
        except ValueError as error:
            raise ConfigError(f"{source}: {key}: {error}") from error
    return values


def read_resource(reference: str) -> tuple[str, str]:
    """Return (text, path) of a file inside a package, named ``"package:file"``, not importing it.

    Raises:
        ConfigError: there is no such package or file.
    """
    package, _, name = reference.partition(":")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / name
        if path.is_file():
            return path.read_text(encoding="utf-8"), str(path)
    raise ConfigError(f"The defaults file {reference!r} does not exist; reinstall its wheel.")


def load(defaults: str | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Return the effective configuration.

    Args:
        defaults: the platform's defaults file, ``"package:file.yaml"``.
        environ: the environment; None for the process's.

    Raises:
        ConfigError: a source holds something that is not allowed.
    """
    built_in = {s.key: Value(s.variable.default, "built-in default") for s in SETTINGS}
    path = env.CONFIG.read(environ)
    if path is not None:
        source = f"{path} ({env.CONFIG.name})"
        return Config({**built_in, **parse_file(path.read_text(encoding="utf-8"), source)})
    platform: dict[str, Value] = {}
    if defaults is not None:
        text, where = read_resource(defaults)
        platform = parse_file(text, f"{where} (platform defaults)")
    variables = {
        s.key: Value(s.variable.read(environ), s.variable.name)
        for s in SETTINGS
        if s.variable.is_set(environ)
    }
    return Config({**built_in, **platform, **variables})
