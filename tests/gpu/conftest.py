"""Engines that take little of a GPU, so that these tests may run beside each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


@pytest.fixture(scope="session")
def vllm(vllm: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Run prompts as elsewhere, on a GPU of which at least a twentieth is free."""
    return partial(vllm, gpu_memory_utilization=0.05)
