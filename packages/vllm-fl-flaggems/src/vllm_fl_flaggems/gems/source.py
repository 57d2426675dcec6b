"""What the installed flag_gems has, read off its source: importing it would start the device."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTED = "5.0.2"
"""The version of flag_gems that this wheel is tested with."""


@dataclass(frozen=True)
class Entry:
    """One line of flag_gems' table of ATen operators.

    Attributes:
        key: the ATen operator with its overload, ``"add.Tensor"``.
        function: flag_gems' name of the function that implements it, ``"add"``.
    """

    key: str
    function: str

    @property
    def names(self) -> tuple[str, ...]:
        """What a user may write for it: the operator, all its overloads, or the function."""
        return self.key, self.key.partition(".")[0], self.function


@dataclass(frozen=True)
class Installed:
    """An installed flag_gems.

    Attributes:
        version: its version.
        entries: its ATen operators.
        folder: where its source is.
    """

    version: str
    entries: tuple[Entry, ...]
    folder: Path = Path()

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Every name that a user may write."""
        return frozenset(name for entry in self.entries for name in entry.names)

    def text(self, *parts: str) -> str:
        """Return the source of one of its modules; "" if there is none of that name."""
        path = self.folder.joinpath(*parts)
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def matching(self, names: frozenset[str]) -> frozenset[str]:
        """Return the keys of the operators that any of ``names`` means."""
        return frozenset(e.key for e in self.entries if not names.isdisjoint(e.names))


def installed() -> Installed | None:
    """Return what is installed, or None."""
    spec = importlib.util.find_spec("flag_gems")
    if spec is None or spec.origin is None:
        return None
    return _read(spec.origin)


@functools.lru_cache(maxsize=1)
def _read(path: str) -> Installed:
    tree = ast.parse(Path(path).read_text(encoding="utf-8"), path)
    values = dict(_assignments(tree))
    version = values.get("__version__")
    table = values.get("_FULL_CONFIG")
    rows = [e.elts for e in getattr(table, "elts", ()) if isinstance(e, ast.Tuple)]
    return Installed(
        str(version.value) if isinstance(version, ast.Constant) else "(version unknown)",
        tuple(
            Entry(str(row[0].value), row[1].id)
            for row in rows
            if isinstance(row[0], ast.Constant) and isinstance(row[1], ast.Name)
        ),
        Path(path).parent,
    )


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
