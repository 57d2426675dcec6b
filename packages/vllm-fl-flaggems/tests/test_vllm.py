"""vLLM on the CPU platform, its layers through interpreted Triton kernels and flag_gems."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("vllm")

HERE = Path(__file__).parent
NEW_TOKENS = 4
OURS = ("rms_norm", "silu_and_mul", "rotary_embedding")


def load(path: Path) -> ModuleType:
    """Load the fixtures of the end-to-end tests, a conftest of another folder."""
    spec = importlib.util.spec_from_file_location("end_to_end", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


E2E = load(HERE.parents[2] / "tests" / "conftest.py")


def generate(folder: Path, **env: str) -> dict[str, Any]:
    """Continue two short prompts in vLLM, greedily."""
    folder.mkdir(exist_ok=True)
    job = {
        "engine": {"model": str(E2E.TINY_MODEL), "dtype": "float32", **E2E.ENGINE},
        "batches": [[[5, 80, 200, 31, 7], [11, 3]]],
        "sampling": {**E2E.GREEDY, "max_tokens": NEW_TOKENS},
    }
    env = {"VLLM_FL_PER_OP": "attention_backend=reference", "TRITON_INTERPRET": "1", **env}
    return E2E.run_job("run_vllm.py", job, folder, **env)


def tokens(result: dict[str, Any]) -> list[list[int]]:
    return [output["tokens"] for output in result["outputs"][0]]


def ran(result: dict[str, Any], op_name: str) -> dict[str, int]:
    """Return implementation -> calls."""
    rows = [row for row in result["operators"][0] if row["op"] == op_name]
    return {row["implementation"]: row["calls"] for row in rows if row["calls"]}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return generate(tmp_path_factory.mktemp("reference"), USE_FLAGGEMS="0")


def test_triton_kernels_generate_the_reference_tokens(
    reference: dict[str, Any], tmp_path: Path
) -> None:
    result = generate(tmp_path)
    assert tokens(result) == tokens(reference)
    assert [len(continuation) for continuation in tokens(result)] == [NEW_TOKENS] * 2
    for op_name in OURS:
        # How many steps there are depends on when the second prompt reaches the engine.
        for run, impl_id in ((reference, "reference.torch"), (result, "default.flagos")):
            assert set(ran(run, op_name)) == {impl_id}
            assert ran(run, op_name)[impl_id] >= NEW_TOKENS


SHIM = """
import os, sys
sys.path.insert(0, {here!r})
import gems_on_cpu
from vllm_fl.dispatch.backend import Backend

class Shim(Backend):
    name = vendor = "a_device_for_flag_gems"

    def start_worker(self, rank):
        gems_on_cpu.pretend_device()
        gems_on_cpu.interpret()
"""


def test_aten_operators_of_a_worker_run_through_flag_gems(
    reference: dict[str, Any], tmp_path: Path
) -> None:
    try:
        version("flag-gems")
    except PackageNotFoundError:
        pytest.skip("flag_gems is not installed")
    (tmp_path / "shim.py").write_text(SHIM.format(here=str(HERE)))
    oplist = tmp_path / "ops.txt"
    result = generate(
        tmp_path / "jobs",
        PYTHONPATH=str(tmp_path),
        VLLM_FL_PLUGIN_MODULES="shim:Shim",
        VLLM_FL_FLAGOS_WHITELIST="rsqrt,mm.out",
        FLAGGEMS_ENABLE_OPLIST_PATH=str(oplist),
        FLAGGEMS_CACHE_DIR=str(tmp_path / "gems"),
    )
    assert tokens(result) == tokens(reference)
    assert "runs 2 ATen operators; they are listed in" in result["log"]
    lines = oplist.read_text().splitlines()
    assert "[DEBUG] flag_gems.ops.rsqrt.rsqrt: aten::rsqrt" in lines
    assert "[DEBUG] flag_gems.ops.mm.mm_out: aten::mm.out" in lines
    assert "[DEBUG] vllm_fl.dispatch.ops.rms_norm: reference.torch" in lines
    for op_name in OURS:
        assert set(ran(result, op_name)) == {"reference.torch"}
