"""What the kernels' source must not contain."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_fl_flaggems.kernels as kernels

FILES = sorted(Path(kernels.__path__[0]).glob("**/*.py"))
GONE = {"make_block_ptr", "advance"}


def jitted(source: str) -> Iterator[ast.FunctionDef]:
    """Yield the functions under a ``triton.jit`` decorator."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            texts = [ast.unparse(decorator) for decorator in node.decorator_list]
            if any(text.startswith("triton.jit") for text in texts):
                yield node


def faults(source: str) -> list[str]:
    """Return what is wrong in the Triton functions of a source."""
    found = []
    for function in jitted(source):
        for node in ast.walk(function):
            line = getattr(node, "lineno", 0)
            if isinstance(node, ast.BoolOp):
                found.append(f"{line}: `and`/`or`: the interpreter drops an operand of a mask")
            if isinstance(node, ast.If) and any(isinstance(n, ast.Return) for n in ast.walk(node)):
                found.append(f"{line}: return inside if: the compiler looks behind it, too")
            if isinstance(node, ast.Attribute) and node.attr in GONE:
                found.append(f"{line}: {node.attr}: block pointers are gone in Triton 3.9")
            if isinstance(node, ast.Attribute) and node.attr == "autotune":
                found.append(f"{line}: autotune: tiles come from tiles.py")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_avoid_what_some_triton_cannot_do(path: Path) -> None:
    assert faults(path.read_text()) == []


def test_there_are_kernels_to_look_at() -> None:
    assert sum(len(list(jitted(path.read_text()))) for path in FILES) >= 4


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("x = (a < 1) and (b < 2)", "and"),
        ("x = tl.make_block_ptr(a)", "make_block_ptr"),
        ("x = a and b or c", "or"),
        ("if a: return b", "return inside if"),
    ],
)
def test_the_check_finds_faults(line: str, fault: str) -> None:
    assert fault in faults(f"@triton.jit\ndef kernel(a, b):\n    {line}\n")[0]
    assert faults(f"def plain(a, b):\n    {line}\n") == []
