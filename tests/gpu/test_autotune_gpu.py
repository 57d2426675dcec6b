"""``vllm-fl autotune`` on a GPU: trials run in an engine with CUDA graphs, also when resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

nvml = pytest.importorskip("vllm_fl_cuda.nvml")
pytestmark = pytest.mark.skipif(not nvml.detect(), reason=str(nvml.detect().reason))

ENGINE = {
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 28,
    "compilation_config": {"cudagraph_capture_sizes": [1, 8]},
}


def test_a_resumed_study_has_graphs_of_the_default(experts_model, tmp_path):
    """The reference, which the first call checks with, is plain PyTorch: it cannot be captured."""
    workload = tmp_path / "few.workload"
    workload.write_text("{requests: 8, prompt: 64, output: 8, concurrency: 8}")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
    command = [
        sys.executable, "-P", "-m", "vllm_fl", "autotune", "--model", str(experts_model),
        "--workload", str(workload), "--engine", json.dumps(ENGINE), "--verify-starts", "0",
        "--storage", f"sqlite:///{tmp_path / 'study.db'}", "--out", str(tmp_path / "tuned.yaml"),
        "--seed", "0", "--json",
    ]  # fmt: skip

    def tune(*more):
        done = subprocess.run(
            [*command, *more],
            env={**clean, "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_FL_PREFER": "flagos"},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    first = tune("--trials", "1")
    assert first["facts"]["graphs"]
    assert first["evidence"]["operators"]["fused_experts"]["available"][0] == "default.flagos"
    (only,) = first["trials"]
    resumed = tune("--resume", "--trials", "3")
    assert resumed["trials"][0] == only
    assert len(resumed["trials"]) == 3
    assert {trial.get("failure") for trial in resumed["trials"]} == {None}
    assert resumed["result"]["trials"] == 3
    # Evidence and trials have an engine each, then the resumed study has one.
    assert [len(found["costs"]["starts"]) for found in (first, resumed)] == [2, 3]
