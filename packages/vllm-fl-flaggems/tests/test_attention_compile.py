"""The attention kernels compile for Hopper; what must be in the code is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_attention.py"))],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


def test_no_loop_spills_and_all_of_it_fits(kernels: dict[str, dict[str, int]]) -> None:
    """Prefill may keep 8 registers of a thread on the stack, with heads of 128 by Triton 3.9."""
    assert len(kernels) == 9
    spilled = {name: facts["stack"] for name, facts in kernels.items() if facts["stack"]}
    assert spilled.keys() <= {"prefill 128 16", "prefill 256 16"}
    assert max(spilled.values(), default=0) <= 32
    assert max(facts["shared"] for facts in kernels.values()) <= 227 * 1024


def test_loads_of_keys_and_values_run_ahead(kernels: dict[str, dict[str, int]]) -> None:
    """A loop loads one tile, and before it those that are ahead; prefill has two loops."""
    for name, facts in kernels.items():
        loops = 2 if name.startswith("prefill") else 1
        assert facts["stages"] >= 2, name
        assert facts["tiles_loaded"] >= loops * facts["stages"], name


def test_products_are_on_tensor_cores(kernels: dict[str, dict[str, int]]) -> None:
    for name, facts in kernels.items():
        kind = "warpgroup_products" if name.startswith("prefill") else "warp_products"
        assert facts[kind] > 0, name


def test_products_of_prefill_run_beside_other_work(kernels: dict[str, dict[str, int]]) -> None:
    """What ptxas cannot leave in flight it serializes, and says so.

    It does for heads of 128, for want of registers. Two programs a multiprocessor make up for it:
    docs/benchmarks.md has what was measured.
    """
    assert {name for name, facts in kernels.items() if facts["serialized"]} == {"prefill 128 16"}
