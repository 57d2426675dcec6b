"""Configuration files: reading and checking them, and their schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import tuned
from vllm_fl.dispatch.errors import ConfigError, nearest
from vllm_fl.dispatch.settings import IN_FILES, Value

if TYPE_CHECKING:
    from pathlib import Path


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
                for key, setting in IN_FILES.items()
            },
            tuned.KEY: tuned.schema(),
        },
    }


def parse_file(text: str, source: str) -> dict[str, Value]:
    """Parse and check the content of a configuration file.

    What a tuned configuration says about itself is checked and left out.

    Raises:
        ConfigError: not YAML, not a mapping, a key that is unknown or given twice, or a value that
            is not allowed.
    """
    values = {}
    for key, raw in _mapping(text, source).items():
        if key == tuned.KEY:
            tuned.check(raw, source)
            continue
        if key not in IN_FILES:
            known = (*IN_FILES, tuned.KEY)
            raise ConfigError(f"{source}: unknown key {key!r}. {nearest(str(key), known)}")
        parse = IN_FILES[key].parse
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
    text = read(path)
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
    from vllm_fl.dispatch.yaml_text import parse  # slow to import

    return parse(text, source)


def read(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: it cannot be read.
    """
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
            return read(path), str(path)
    raise ConfigError(f"The defaults file {reference!r} does not exist; reinstall its wheel.")
