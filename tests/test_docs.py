"""What the documentation shows is run: Python blocks, YAML, TOML, and every command.

A command line that would take a model, a GPU or the package index is run as far as that is not
needed: what is before ``vllm serve`` is given to ``vllm-fl config``, and the files, sessions and
wheels that others name must exist. Those scripts and sessions have tests of their own.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from vllm_fl.cli.main import make_parser
from vllm_fl.dispatch.config_file import parse_file
from vllm_fl.dispatch.discovery import PLUGIN_GROUP

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BIN = Path(sys.executable).parent
GENERATED = ("environment.md", "operators.md")


def blocks(language: str) -> list[tuple[str, str]]:
    """Return (page, text) of each fenced block, once each."""
    pattern = re.compile(rf"```{language}\n(.*?)```", re.S)
    found = {text: page.name for page in PAGES for text in pattern.findall(page.read_text())}
    return [(page, text) for text, page in found.items()]


def command_lines() -> list[str]:
    """Return each line of the indented blocks, once, without its remark."""
    lines: dict[str, None] = {}
    for page in PAGES:
        if page.name in GENERATED:
            continue
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        text = re.sub(r"\\\n\s*", "", text)
        for line in re.findall(r"^(?: {4}| {8})(\S.*)", text, re.M):
            lines[re.sub(r"\s+# .*", "", line)] = None
    return sorted(lines)


def split(line: str) -> tuple[dict[str, str], list[str]]:
    """Split a command line into its variables and its words."""
    words = shlex.split(line)
    words = words[: words.index(">")] if ">" in words else words
    count = next(i for i, word in enumerate(words) if not re.match(r"\w+=", word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def is_run(words: list[str]) -> bool:
    """Whether a ``vllm-fl`` command needs nothing that is not here."""
    return (
        words[0] == "vllm-fl"
        and words[1] in ("list", "explain", "config", "doctor", "verify", "profile")
        and not {"MODEL", "acme", "vendor.acme", "cuda", "ascend", "flaggems"} & set(words)
        and words[1:] != ["verify", "reference"]
    )


RUN = [line for line in command_lines() if is_run(split(line)[1])]
CHECKED = [line for line in command_lines() if line not in RUN]


def environ(**more: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **more}


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_blocks_run(page, code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_yaml_blocks_are_valid(page, text):
    assert parse_file(text, page)


def test_the_entry_point_is_the_one_that_is_read():
    ((_, text),) = blocks("toml")
    (group,) = tomllib.loads(text)["project"]["entry-points"]
    assert group == PLUGIN_GROUP


@pytest.mark.parametrize("line", RUN)
def test_commands_run(line):
    variables, words = split(line)
    done = subprocess.run(
        words, env=environ(**variables), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("line", CHECKED)
def test_commands_are_what_they_say(line, tmp_path, monkeypatch, capsys):
    variables, words = split(line)
    assert words[0] in CHECKS, f"no test knows how to check {words[0]!r}"
    monkeypatch.chdir(ROOT)
    for name in ("CONFIG", "TUNED_DIR", "PLUGIN_MODULES", "FLAGOS_WHITELIST", "FLAGOS_BLACKLIST"):
        variables.pop(f"VLLM_FL_{name}", None)  # need files, or names that flag_gems knows
    if any(name.startswith("VLLM_FL_") for name in variables):
        done = subprocess.run(
            ["vllm-fl", "config"], env=environ(**variables), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    CHECKS[words[0]](words[1:])


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    for word in words[1:]:
        name, _, extras = word.partition("[")
        if name.startswith("vllm-fl-") and name != "vllm-fl-acme":
            pyproject = (ROOT / "packages" / name / "pyproject.toml").read_text()
            for extra in filter(None, extras.rstrip("]").split(",")):
                assert f"\n{extra} = [" in pyproject


def check_nox(words: list[str]) -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    sessions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert words[0] == "-s"
    assert words[1] in sessions


def check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "pip"]:
        check_pip(words[2:])
    elif words[0] == "-m":
        place = ROOT / words[1].replace(".", "/")
        assert place.is_dir() or place.with_suffix(".py").exists()
    else:
        assert (ROOT / words[0]).is_file()


def check_pytest(words: list[str]) -> None:
    assert all((ROOT / word).exists() for word in words if "/" in word)


def check_vllm(words: list[str]) -> None:
    assert words[0] == "serve"


def check_vllm_fl(words: list[str]) -> None:
    _, others = make_parser().parse_known_args(words)
    assert not others or words[0] == "profile"  # which hands them to vLLM


def not_ours(words: list[str]) -> None:
    """Programs of the system."""


CHECKS = {
    "grep": not_ours,
    "source": not_ours,
    "pip": check_pip,
    "nox": check_nox,
    "python": check_python,
    "pytest": check_pytest,
    "vllm": check_vllm,
    "vllm-fl": check_vllm_fl,
}


def test_the_site_builds_and_needs_no_other_site(tmp_path):
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env=environ(NO_MKDOCS_2_WARNING="1"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for page in PAGES[2:]:
        name = page.name.removesuffix(".md").removesuffix(".zh")
        folder = tmp_path / ("zh" if page.name.endswith(".zh.md") else "")
        place = folder / page.relative_to(ROOT / "docs").with_name(name)
        assert (place.with_name("index.html") if name == "index" else place / "index.html").exists()
    for built in tmp_path.rglob("*.html"):
        loads = re.findall(
            r'<(?:script|img|link)[^>]*(?:src|href)="?https?:[^>]*>', built.read_text()
        )
        assert not loads, built


def test_there_is_something_to_run():
    assert len(RUN) >= 8
    assert len(CHECKED) >= 20
    assert blocks("python")
    assert blocks("yaml")


def test_a_translation_shows_the_commands_and_code_of_the_page():
    def shown(page: Path) -> list[str]:
        text = page.read_text()
        lines = re.findall(r"^    (\S.*)", text, re.M)
        fenced = re.findall(r"```python\n.*?```", text, re.S)
        return [re.sub(r"\s+# .*", "", line) for line in lines] + fenced

    translated = sorted((ROOT / "docs").rglob("*.zh.md"))
    assert len(translated) >= 7
    for page in translated:
        original = page.with_name(page.name.replace(".zh.md", ".md"))
        assert shown(page) == shown(original), page.name
