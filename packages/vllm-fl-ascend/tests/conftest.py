"""Makes the modules beside the tests and the emulated torch_npu importable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
settings.register_profile("ascend", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("ascend")
sys.path[:0] = [str(HERE), str(HERE / "emulator")]


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("VLLM_FL_", "ASCEND_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _cpu_is_the_device(monkeypatch):
    from vllm_fl_ascend import device

    monkeypatch.setattr(device, "DEVICE", "cpu")
