"""Every environment variable of vllm-fl: its parser, default and documentation.

They are read here alone, and the table in docs/environment.md is generated from
:data:`VARIABLES`. Values are parsed strictly: what cannot be understood is an error that
names the variable, what was given and what is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pathlib import Path

_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def parse_bool(text: str) -> bool:
    """Parse 1/true/yes/on and 0/false/no/off, in any case."""
    value = _BOOLEANS.get(text.strip().lower())
    if value is None:
        raise ValueError(f"not a boolean. Allowed: {', '.join(_BOOLEANS)}.")
    return value


def parse_list(text: str) -> tuple[str, ...]:
    """Parse comma-separated names; blanks around them are dropped, empty entries refused."""
    if not text.strip():
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError("an entry between commas is empty. Write 'a,b'.")
    return names


def parse_per_op(text: str) -> dict[str, tuple[str, ...]]:
    """Parse ``"rms_norm=vendor|flagos;silu_and_mul=reference"`` into operator -> order tokens.

    The operator may be one in a phase, as in ``attention_backend.decode``.
    """
    orders: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        op, separator, tokens = entry.partition("=")
        order = tuple(token.strip() for token in tokens.split("|"))
        if not separator or not op.strip() or not all(order):
            raise ValueError(f"{entry!r} is not of the form 'operator=token|token'.")
        if op.strip() in orders:
            raise ValueError(f"operator {op.strip()!r} appears twice.")
        orders[op.strip()] = order
    if not orders:
        raise ValueError("no order is given. Write 'operator=token|token', or unset the variable.")
    return orders


def parse_yardsticks(text: str) -> dict[str, str]:
    """Parse ``"rms_norm=reference,silu_and_mul=reference"`` into operator -> order token."""
    yardsticks: dict[str, str] = {}
    for entry in parse_list(text):
        op, separator, token = (part.strip() for part in entry.partition("="))
        if not (separator and op and token):
            raise ValueError(f"{entry!r} is not of the form 'operator=token'.")
        if op in yardsticks:
            raise ValueError(f"operator {op!r} appears twice.")
        yardsticks[op] = token
    return yardsticks


def parse_limit(text: str) -> float:
    """Parse a number that is not negative."""
    value = float(text)
    if not value >= 0:
        raise ValueError("not a number of at least 0.")
    return value


def parse_choice(*allowed: str) -> Callable[[str], str]:
    """Return a parser that takes one of ``allowed``, in any case."""

    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in allowed:
            raise ValueError(nearest(value, allowed))
        return value

    return parse


def parse_log_level(text: str) -> str:
    """Parse a level name of the logging module, in any case."""
    return parse_choice("debug", "info", "warning", "error", "critical")(text).upper()


def parse_path(text: str) -> Path:
    """Parse a path; ``~`` is the home folder."""
    from pathlib import Path  # slow to import, and rarely needed

    return Path(text).expanduser()


def parse_file(text: str) -> Path:
    """Parse the path of an existing file."""
    path = parse_path(text)
    if not path.is_file():
        raise ValueError("no such file. Give the path of an existing file, or unset the variable.")
    return path


def parse_folder(text: str) -> Path:
    """Parse the path of an existing folder."""
    path = parse_path(text)
    if not path.is_dir():
        raise ValueError("no such folder. Give the path of an existing one, or unset the variable.")
    return path


@dataclass(frozen=True)
class EnvVar:
    """One environment variable.

    Attributes:
        name: the full name.
        parse: turns the text into a value; raises ValueError with what is allowed.
        default: the value when the variable is unset or empty.
        form: how a value is written, for the documentation.
        doc: what it does.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    form: str
    doc: str

    def read(self, environ: Mapping[str, str] | None = None) -> Any:
        """Return the parsed value, or the default when unset or blank.

        Raises:
            ConfigError: the text cannot be parsed.
        """
        text = (os.environ if environ is None else environ).get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"{self.name}={text!r}: {error}") from error

    def write(self, value: object) -> None:
        """Set the variable for this process and those that it starts; None unsets it."""
        if value is None:
            os.environ.pop(self.name, None)
        else:
            os.environ[self.name] = str(value)

    def is_set(self, environ: Mapping[str, str] | None = None) -> bool:
        """Whether the variable is set to something other than blanks."""
        return bool((os.environ if environ is None else environ).get(self.name, "").strip())


CONFIG = EnvVar(
    "VLLM_FL_CONFIG", parse_file, None, "path",
    "A YAML file with the whole configuration. It replaces every other source but the switches "
    "that a file cannot hold: VLLM_FL_PREFER_ENABLED, VLLM_FL_OOT_ENABLED and USE_FLAGGEMS.",
)  # fmt: skip
TUNED_DIR = EnvVar(
    "VLLM_FL_TUNED_DIR", parse_folder, None, "path",
    "A folder of tuned configurations (`vllm-fl autotune`): that for the device and the model's "
    "shape is laid over the platform's defaults, if the versions are those it was measured with.",
)  # fmt: skip
TUNED_FILE = EnvVar(
    "VLLM_FL_TUNED_FILE", parse_file, None, "path",
    "The tuned configuration in use, laid over the platform's defaults. vllm-fl sets it, for its "
    "workers, too, to what it finds in VLLM_FL_TUNED_DIR.",
)  # fmt: skip
PREFER = EnvVar(
    "VLLM_FL_PREFER", parse_choice("flagos", "vendor", "reference"), "flagos",
    "flagos | vendor | reference",
    "The kind of implementation that is tried first; the other kinds follow. It goes before the "
    "orders and lists of layers of the platform's defaults.",
)  # fmt: skip
STRICT = EnvVar(
    "VLLM_FL_STRICT", parse_bool, False, "boolean",
    "On: the first error of an implementation raises, nothing falls back.",
)  # fmt: skip
PER_OP = EnvVar(
    "VLLM_FL_PER_OP", parse_per_op, {}, "op=token|token;op=token",
    "Per operator, the order tokens to try. Tokens: flagos, vendor, vendor:NAME, reference, "
    "impl:ID. Only what is listed may run, also where the platform's defaults leave the layer to "
    "vLLM. Attention may differ by phase: "
    "attention_backend.decode=token;attention_backend.prefill=token.",
)  # fmt: skip
ALLOW_VENDORS = EnvVar(
    "VLLM_FL_ALLOW_VENDORS", parse_list, None, "a,b",
    "Vendors whose implementations may run; unset means all.",
)  # fmt: skip
DENY_VENDORS = EnvVar(
    "VLLM_FL_DENY_VENDORS", parse_list, (), "a,b",
    "Vendors whose implementations may not run.",
)  # fmt: skip
PREFER_ENABLED = EnvVar(
    "VLLM_FL_PREFER_ENABLED", parse_bool, True, "boolean",
    "The master switch. Off: no operator of the default backend, and vLLM keeps its own layers; "
    "platform, worker and attention selection stay.",
)  # fmt: skip
USE_FLAGGEMS = EnvVar(
    "USE_FLAGGEMS", parse_bool, None, "boolean",
    "Off: no operator of the default (FlagGems/Triton) backend; vendor and reference remain. "
    "On: besides its operators, flag_gems also runs PyTorch's (ATen) operators in eager code. Not "
    "set: its operators alone.",
)  # fmt: skip
FLAGOS_WHITELIST = EnvVar(
    "VLLM_FL_FLAGOS_WHITELIST", parse_list, None, "a,b",
    "The only operators that the default backend may run; names of ATen operators that flag_gems "
    "has (mm, add.Tensor) let it run those.",
)  # fmt: skip
FLAGOS_BLACKLIST = EnvVar(
    "VLLM_FL_FLAGOS_BLACKLIST", parse_list, (), "a,b or +a,+b",
    "Operators that the default backend may not run, ATen operators among them; +name adds to the "
    "platform's list.",
)  # fmt: skip
OOT_ENABLED = EnvVar(
    "VLLM_FL_OOT_ENABLED", parse_bool, True, "boolean",
    "Off: vLLM keeps its own layers; attention is still dispatched. A warning names the orders and "
    "preferences that then have no effect, or act on attention alone.",
)  # fmt: skip
OOT_WHITELIST = EnvVar(
    "VLLM_FL_OOT_WHITELIST", parse_list, None, "a,b",
    "The only operators whose vLLM layers are replaced by dispatched ones.",
)  # fmt: skip
OOT_BLACKLIST = EnvVar(
    "VLLM_FL_OOT_BLACKLIST", parse_list, (), "a,b or +a,+b",
    "Operators whose vLLM layers are kept; +name adds to the platform's list.",
)  # fmt: skip
PLATFORM = EnvVar(
    "VLLM_FL_PLATFORM", str.strip, None, "name",
    "The device to run on, by the name of the backend that provides it (see `vllm-fl list`), "
    "instead of the first that claims this machine.",
)  # fmt: skip
PLUGIN_MODULES = EnvVar(
    "VLLM_FL_PLUGIN_MODULES", parse_list, (), "module,module:object",
    "More backends: importable modules with `register_builtins(registry)`, or `module:Backend`.",
)  # fmt: skip
LOG_LEVEL = EnvVar(
    "VLLM_FL_LOG_LEVEL", parse_log_level, "INFO", "debug | info | warning | error | critical",
    "Level of the vllm_fl loggers.",
)  # fmt: skip
DISPATCH_DEBUG = EnvVar(
    "VLLM_FL_DISPATCH_DEBUG", parse_bool, False, "boolean",
    "Print every decision with its reasons, count calls, and print the counts at exit.",
)  # fmt: skip

COMPARE = EnvVar(
    "VLLM_FL_COMPARE", parse_yardsticks, {}, "op=token,op=token",
    "Eager mode only: also run this implementation of the operator on copies of the live inputs "
    "and report the largest difference in each layer, and which operators no layer called.",
)  # fmt: skip
COMPARE_LIMIT = EnvVar(
    "VLLM_FL_COMPARE_LIMIT", parse_limit, None, "number",
    "Stop at a difference above this share of the largest element.",
)  # fmt: skip
OPLIST = EnvVar(
    "VLLM_FL_OPLIST", parse_path, None, "path",
    "Write the implementations in use to this file (rank N > 0: path.rankN).",
)  # fmt: skip
FLAGGEMS_OPLIST = EnvVar(
    "FLAGGEMS_ENABLE_OPLIST_PATH", parse_path, None, "path",
    "The same under its older name; VLLM_FL_OPLIST wins. When flag_gems runs ATen operators, the "
    "list is /tmp/flaggems_enable_oplist.txt if neither is set.",
)  # fmt: skip

FOREIGN: Mapping[str, str] = {
    "FLAGCX_PATH": "collectives are those of the platform (NCCL, HCCL or Gloo). Unset it; another "
    "library comes with a platform class whose get_device_communicator_cls names its communicator",
}
"""Variable that users may know from elsewhere -> what there is instead."""

VARIABLES: tuple[EnvVar, ...] = tuple(v for v in list(globals().values()) if isinstance(v, EnvVar))


def texts(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of vllm-fl that are set, as they are written."""
    source = os.environ if environ is None else environ
    return {
        variable.name: source[variable.name] for variable in VARIABLES if variable.is_set(source)
    }


def environ_without(*variables: EnvVar) -> dict[str, str]:
    """Return the environment for a process that shall not see some variables."""
    names = {variable.name for variable in variables}
    return {name: text for name, text in os.environ.items() if name not in names}


def unknown_variables(environ: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield (name, advice) for every set ``VLLM_FL_`` variable that does not exist."""
    known = {variable.name for variable in VARIABLES}
    for name in sorted(os.environ if environ is None else environ):
        if name.startswith("VLLM_FL_") and name not in known:
            yield name, nearest(name, known)


def foreign_variables(environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield a sentence about each variable that is set for something like this, and not read."""
    source = os.environ if environ is None else environ
    for name, instead in FOREIGN.items():
        if name in source:
            yield f"{name} is not read: {instead}."
