"""Tuned configurations: what a file says about itself, and whether it is for this machine.

A tuned configuration is a configuration file with a block ``tuned`` that states what it was
measured on. It is for one device and one shape of model, and for the versions it was measured with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import discovery
from vllm_fl.dispatch.errors import ConfigError, nearest
from vllm_fl.dispatch.types import YES, Decision

if TYPE_CHECKING:
    from pathlib import Path

KEY = "tuned"
FIELDS: Mapping[str, tuple[type[Any], str]] = {
    "model": (str, "the model's name or folder"),
    "device": (str, "the device's name"),
    "shape": (dict, "what of the model decides about the shapes of its operators"),
    "versions": (dict, "package -> version"),
    "workload": (str, "what was measured"),
    "objective": (str, "what was maximised"),
    "gain": (dict, "measure over that of the default: value, low, high, level, count"),
    "noise": (dict, "the default over itself in the same run, in the same form"),
    "measured_in": (str, "how the engine ran when the gain was measured"),
    "date": (str, "when, in ISO 8601"),
}
"""Keys of the block, all required: type and meaning."""

_FIRST = ("architecture", "device")
_PACKAGES = ("vllm", "torch", "triton", "vllm-fl-core")


@dataclass(frozen=True)
class Facts:
    """What a tuned configuration is for.

    Attributes:
        device: the device's name.
        shape: see :data:`FIELDS`.
        versions: package -> version.
    """

    device: str
    shape: Mapping[str, Any]
    versions: Mapping[str, str]


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the block."""
    names: dict[type[Any], str] = {str: "string", dict: "object"}
    return {
        "description": "What a tuned configuration was measured on; written by the tuner.",
        "type": "object",
        "additionalProperties": False,
        "required": list(FIELDS),
        "properties": {
            key: {"description": text, "type": names[kind]} for key, (kind, text) in FIELDS.items()
        },
    }


def check(block: Any, source: str) -> dict[str, Any]:
    """Return the block if it has the form that it must have.

    Raises:
        ConfigError: a key is unknown or missing, or a value has another type.
    """
    if not isinstance(block, dict):
        raise ConfigError(f"{source}: {KEY} must be a mapping, not {block!r}.")
    for key, value in block.items():
        if key not in FIELDS:
            raise ConfigError(f"{source}: {KEY}: unknown key {key!r}. {nearest(key, FIELDS)}")
        if not isinstance(value, FIELDS[key][0]):
            raise ConfigError(f"{source}: {KEY}: {key}: {value!r} is not {FIELDS[key][1]}.")
    missing = [key for key in FIELDS if key not in block]
    if missing:
        raise ConfigError(f"{source}: {KEY}: {', '.join(missing)} is missing.")
    return block


def installed_versions() -> dict[str, str]:
    """Return the versions of what decides about speed, and of every backend's wheel."""
    records = discovery.get_discovered_plugins()
    named = [name for record in records if record.backend for name in record.backend.packages]
    found = {}
    for name in (*_PACKAGES, *named):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {r.distribution: r.version for r in records if r.distribution}


def is_for(block: Mapping[str, Any], facts: Facts) -> Decision:
    """Whether a configuration is for this device and shape, whatever the versions."""
    differences = _differences(
        {"device": block["device"], **block["shape"]}, {"device": facts.device, **facts.shape}
    )
    return Decision.no("; ".join(differences)) if differences else YES


def decide(block: Mapping[str, Any], facts: Facts) -> Decision:
    """Whether a configuration that is for this device and shape was measured on these versions."""
    differences = _differences(block["versions"], facts.versions)
    if differences:
        return Decision.no(f"it was measured with other versions: {'; '.join(differences)}")
    return YES


def names_what_is_here(
    orders: Mapping[str, Sequence[str]], is_here: Callable[[str, str], bool]
) -> Decision:
    """Whether the implementations that orders name first are registered here.

    Args:
        orders: operator (and phase) -> order tokens.
        is_here: says so of an operator and an implementation id.
    """
    absent = [
        f"{name}: {order[0].removeprefix('impl:')}"
        for name, order in orders.items()
        if order[0].startswith("impl:")
        and not is_here(name.partition(".")[0], order[0].removeprefix("impl:"))
    ]
    if absent:
        return Decision.no(f"it chooses implementations that are absent here: {', '.join(absent)}")
    return YES


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say for each key whose value is another one what it was and is; device and model first."""
    pairs = {
        key: (then.get(key, "absent"), now.get(key, "absent"))
        for key in sorted({*then, *now}, key=lambda key: (key not in _FIRST, key))
    }
    return [f"{key} was {was}, is {here}" for key, (was, here) in pairs.items() if was != here]


@dataclass(frozen=True)
class Choice:
    """What a folder of tuned configurations has for an engine.

    Attributes:
        path: the file that is used; None for none.
        refused: why files for this device and shape are not: measured with other versions, or
            with implementations that are not here.
        others: why files for this architecture are not: for another device or shape, or older.
    """

    path: Path | None
    refused: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def choose(
    blocks: Iterable[tuple[Path, Mapping[str, Any]]],
    facts: Facts,
    is_complete: Callable[[Path], Decision] = lambda path: YES,
) -> Choice:
    """Choose among files with their blocks; of several that are right the latest counts.

    Args:
        blocks: the files.
        facts: what there is here.
        is_complete: whether what a file chooses is here; asked where all else is right.
    """
    accepted: list[tuple[str, Path]] = []
    refused, others = [], []
    for path, block in blocks:
        here = is_for(block, facts)
        now = here and decide(block, facts) and is_complete(path)
        if here and now:
            accepted.append((block["date"], path))
        elif here:
            refused.append(f"{path} is not used: {now.reason}")
        elif block["shape"].get("architecture") == facts.shape.get("architecture"):
            others.append(f"{path} is not used: {here.reason}")
    accepted.sort()
    right = accepted[-1][1] if accepted else None
    others += [f"{older} is not used: {right} is newer" for _, older in accepted[:-1]]
    return Choice(right, tuple(refused), tuple(others))
