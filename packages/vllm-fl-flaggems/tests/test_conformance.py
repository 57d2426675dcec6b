"""The conformance kit, every kernel interpreted."""

from __future__ import annotations

import pytest

from vllm_fl.testing.suite import conformance_test
from vllm_fl_flaggems import tiles


@pytest.fixture(autouse=True)
def _few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split requests into three parts at most: interpreting an idle program takes milliseconds."""
    monkeypatch.setattr(tiles, "_MOST_SPLITS", 3)
    tiles.decode_tile.cache_clear()


test_conformance = conformance_test("flaggems", device="cpu")
