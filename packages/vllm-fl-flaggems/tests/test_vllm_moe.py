"""vLLM on the CPU platform: a mixture of experts, its routing and experts interpreted."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("vllm")

END_TO_END = Path(__file__).parents[3] / "tests"
PROMPTS = [[5, 80, 200, 31, 7], [11, 3]]
NEW_TOKENS = 3
OURS = ("topk_softmax", "fused_experts", "moe_align_block_size", "moe_sum")
OTHERS = ("attention_backend", "rms_norm", "silu_and_mul", "rotary_embedding")


def load(path: Path) -> ModuleType:
    """Load the fixtures of the end-to-end tests, a conftest of another folder."""
    spec = importlib.util.spec_from_file_location("end_to_end_moe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_experts_generate_the_tokens_of_transformers(tmp_path: Path) -> None:
    end_to_end = load(END_TO_END / "conftest.py")
    subprocess.run(
        [sys.executable, "-P", str(END_TO_END / "make_models.py"), str(tmp_path), "qwen3_moe"],
        check=True,
    )
    model, jobs = str(tmp_path / "qwen3_moe"), tmp_path / "jobs"
    jobs.mkdir()
    small = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "max_model_len": 16}
    job = {
        "engine": {"model": model, "dtype": "float32", **end_to_end.ENGINE, **small},
        "batches": [PROMPTS],
        "sampling": {**end_to_end.GREEDY, "max_tokens": NEW_TOKENS},
    }
    per_op = ";".join(f"{name}=reference" for name in OTHERS)
    result = end_to_end.run_job(
        "run_vllm.py", job, jobs, VLLM_FL_PER_OP=per_op, TRITON_INTERPRET="1"
    )
    expected = end_to_end.run_job(
        "run_transformers.py",
        {"model": model, "dtype": "float32", "prompts": PROMPTS, "new_tokens": NEW_TOKENS},
        jobs,
    )
    assert [output["tokens"] for output in result["outputs"][0]] == expected["tokens"]
    ran = {row["op"]: row["implementation"] for row in result["operators"][0] if row["calls"]}
    assert [ran[name] for name in OURS] == ["default.flagos"] * 4
