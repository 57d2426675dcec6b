"""Fixtures of the core's tests: private managers, a clean environment, throw-away wheels."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from vllm_fl.dispatch import (
    BackendImplKind,
    OpImpl,
    OpManager,
    SelectionPolicy,
    get_logger,
    reset_default_manager,
    reset_global_policy,
    set_global_policy,
    state,
)

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside the tests
settings.register_profile("core", deadline=None, derandomize=True)
settings.load_profile("core")


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in [n for n in os.environ if n.startswith("VLLM_FL_")]:
        monkeypatch.delenv(name)
    # Managers of earlier tests live until they are collected, and would react to policies.
    state._listeners.clear()
    reset_default_manager()
    set_global_policy(SelectionPolicy())
    yield
    reset_default_manager()
    reset_global_policy()


@pytest.fixture
def manager() -> OpManager:
    return OpManager(register_builtins=False)


@pytest.fixture
def log():
    """What the vllm_fl loggers said, as records."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = get_logger("vllm_fl")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


KINDS = {
    "default": BackendImplKind.DEFAULT,
    "vendor": BackendImplKind.VENDOR,
    "reference": BackendImplKind.REFERENCE,
}


@pytest.fixture
def impl() -> Callable[..., OpImpl]:
    """Make an implementation of silu_and_mul that answers (its id, x)."""

    def make(impl_id: str, fn: Callable[..., Any] | None = None, **more: Any) -> OpImpl:
        kind = KINDS[impl_id.split(".")[0]]
        vendor = impl_id.split(".")[1] if kind is BackendImplKind.VENDOR else None
        default = {"op_name": "silu_and_mul", "kind": kind, "vendor": vendor}
        return OpImpl(impl_id=impl_id, fn=fn or (lambda x: (impl_id, x)), **{**default, **more})

    return make


class WheelFolder:
    """A folder on sys.path that holds throw-away distributions with real metadata."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        distribution: str,
        code: str,
        *,
        version: str = "1.0",
        entry: str | None = None,
        value: str | None = None,
        metadata: str = "dist-info",
        record: bool = False,
    ) -> None:
        module = distribution.replace("-", "_")
        (self.path / f"{module}.py").write_text(code)
        info = self.path / f"{module}-{version}.{metadata}"
        info.mkdir()
        name = "METADATA" if metadata == "dist-info" else "PKG-INFO"
        (info / name).write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        if record:
            (info / "RECORD").write_text(f"{module}.py,,\n")
        (info / "entry_points.txt").write_text(
            f"[vllm_fl.backends]\n{entry or distribution} = {value or module + ':B'}\n"
        )

    def python(self, code: str, *more_path: Path, **env: str) -> Any:
        """Run code in a fresh process with the folder on its path; return the JSON it prints."""
        done = self.process(code, *more_path, **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def process(self, code: str, *more_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(str(p) for p in (self.path, *more_path))
        environ = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env={**environ, "PYTHONPATH": path, **env},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def wheels(tmp_path) -> WheelFolder:
    return WheelFolder(tmp_path / "site")
