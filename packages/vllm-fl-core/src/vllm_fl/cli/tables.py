"""Plain text for people: aligned columns and indented keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns under a header."""
    lines = [list(header), ["-" * len(name) for name in header], *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for column, width in enumerate(widths):
        lines[1][column] = "-" * width
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def key_values(value: Any, indent: int = 0) -> str:
    """Return nested mappings and lists as indented lines."""
    pad = "  " * indent
    if isinstance(value, dict):
        items: list[tuple[str, Any]] = [(f"{key}:", inner) for key, inner in value.items()]
    else:
        items = [("-", inner) for inner in value]
    lines = []
    for label, inner in items:
        if isinstance(inner, (dict, list, tuple)) and inner:
            lines.append(f"{pad}{label}\n{key_values(inner, indent + 1)}")
        else:
            shown = "none" if inner is None or inner in ({}, [], ()) else inner
            lines.append(f"{pad}{label} {shown}")
    return "\n".join(lines)
