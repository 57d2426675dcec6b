"""Makes the modules beside the tests importable, and the tests independent of their environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("VLLM_FL_", "CUDA_"))]:
        monkeypatch.delenv(name)
