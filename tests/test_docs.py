"""What the documentation shows is run: Python blocks, YAML, and vllm-fl commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fl.dispatch.config import parse_file

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[tuple[str, str]]:
    pattern = re.compile(rf"```{language}\n(.*?)```", re.S)
    return [(page.name, text) for page in PAGES for text in pattern.findall(page.read_text())]


def commands() -> list[str]:
    text = "\n".join(page.read_text() for page in PAGES)
    found = set(re.findall(r"^    (vllm-fl [a-z]+(?: [a-z_][\w/.-]*)?)", text, re.M))
    return sorted(c for c in found if not c.startswith("vllm-fl verify"))  # needs a device


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_blocks_run(page, code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_yaml_blocks_are_valid(page, text):
    assert parse_file(text, page)


@pytest.mark.parametrize("command", commands())
def test_commands_run(command):
    environ = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command.split(), env=environ, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_is_something_to_run():
    assert len(commands()) >= 4
    assert blocks("python")
    assert blocks("yaml")
