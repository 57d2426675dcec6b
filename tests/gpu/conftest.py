"""Engines that take little of a GPU, so that these tests may run beside each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def vllm(vllm: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Run prompts as elsewhere, on a GPU of which at least a twentieth is free."""
    return partial(vllm, gpu_memory_utilization=0.05)


@pytest.fixture(scope="session")
def experts_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture of experts with random weights."""
    folder = tmp_path_factory.mktemp("models")
    script = Path(__file__).parents[1] / "make_models.py"
    subprocess.run([sys.executable, "-P", str(script), str(folder), "qwen3_moe"], check=True)
    return folder / "qwen3_moe"
