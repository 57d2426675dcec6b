"""An environment of a test's own, over the one that runs the tests, to install wheels into."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def build_wheel(project: Path) -> Path:
    """Build a project's wheel into its dist/ folder."""
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", cwd=project)
    (wheel,) = project.glob("dist/*.whl")
    return wheel


def write_project(
    folder: Path,
    distribution: str,
    modules: dict[str, str],
    *,
    value: str,
    version: str = "1.0",
    core: str = ">=0.1.0.dev0,<0.2",
) -> Path:
    """Write a small project with an entry point of its vendor's name.

    Args:
        folder: the project's folder, made here.
        distribution: "vllm-fl-NAME"; the import name follows from it.
        modules: module of the package -> code.
        value: what the entry point names inside of the package.
        version: the wheel's version.
        core: the versions of vllm-fl-core that it asks for.
    """
    package = distribution.replace("-", "_")
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").touch()
    for name, code in modules.items():
        (folder / package / f"{name}.py").write_text(code)
    (folder / "pyproject.toml").write_text(
        f"""
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{distribution}"
version = "{version}"
dependencies = ["vllm-fl-core{core}"]
[project.entry-points."vllm_fl.backends"]
{distribution.removeprefix("vllm-fl-")} = "{package}.{value}"
"""
    )
    return folder


class Overlay:
    """A virtual environment that sees the packages of the one that runs the tests."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        below = [p for p in sys.path if p.endswith(("-packages", "/src"))]
        (self.site / "below.pth").write_text("".join(f"{path}\n" for path in below))

    def pip(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run pip on this environment, without an index."""
        pip = ("-m", "pip", "--python", self.python, "--disable-pip-version-check")
        return _run(sys.executable, *pip, *arguments, check=False)

    def unpack(self, *wheels: Path) -> None:
        """Install wheels of Python code as pip would, without its checks and in no time."""
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(self.site)

    def install(self, *arguments: str | Path) -> None:
        """Install with pip; what the wheels require must be here already."""
        quick = ("-q", "--no-index", "--no-build-isolation", "--no-compile", "--no-warn-conflicts")
        done = self.pip("install", *quick, *arguments)
        assert done.returncode == 0, done.stderr

    def run(self, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
        clean.pop("PYTHONPATH", None)
        return _run(self.python, *arguments, check=False, env={**clean, **env})

    def fl(self, *arguments: str | Path, **env: str) -> Any:
        """Run ``vllm-fl ... --json``; return what it prints."""
        done = self.run("-m", "vllm_fl", *arguments, "--json", OMP_NUM_THREADS="1", **env)
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    def backends(self, **env: str) -> dict[str, dict[str, Any]]:
        """Return name -> row of ``vllm-fl list``."""
        return {row["name"]: row for row in self.fl("list", **env)["backends"]}

    def decisions(self, op: str, **env: str) -> dict[str, tuple[str, str]]:
        """Return implementation -> (wheel, decision) of ``vllm-fl explain``."""
        rows = self.fl("explain", op, **env)["implementations"]
        return {row["impl_id"]: (row["wheel"], row["decision"]) for row in rows}


def _run(*command: str | Path, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **more
    )
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done
