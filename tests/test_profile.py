"""``vllm-fl profile`` on the CPU, through real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TINY_MODEL = Path(__file__).parent.parent / "examples" / "tiny-qwen3"
BIN = Path(sys.executable).parent


def profile(*arguments, **environ):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
    return subprocess.run(
        [str(BIN / "vllm-fl"), "profile", *map(str, arguments)],
        env={**clean, "OMP_NUM_THREADS": "1", "VLLM_FL_PLATFORM": "reference", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The data and the page of a run with random weights and two workers."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "config.json").write_text((TINY_MODEL / "config.json").read_text())
    page = folder / "page.html"
    done = profile(
        folder, "--json", "--html", page, "--batch", 3, "--prompt-tokens", 20, "--output-tokens", 6,
        "--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--tensor-parallel-size", 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), page.read_text(), done.stderr


def test_phases_are_exact(written):
    """Every layer's projections, in each of two workers, once a step."""
    data, _, _ = written
    layers = json.loads((TINY_MODEL / "config.json").read_text())["num_hidden_layers"]
    for phase, steps in (("prefill", 1), ("decode", 5)):
        found = data["phases"][phase]
        assert found["steps"] == steps
        kernels = {row["kernel"]: row for row in found["kernels"]}
        attention = kernels["vllm::unified_attention_with_output"]
        assert attention["calls"] == 2 * layers * steps, phase
        assert attention["origin"] == "vLLM"
        assert sum(row["share"] for row in found["origins"]) == pytest.approx(1)
        assert found["triton_share"] == 0


def test_what_ran_is_told(written):
    data, page, progress = written
    assert data["unit"] == "CPU time"
    assert data["random_weights"] is True
    assert data["dtype"] == "float32"
    assert data["tensor_parallel_size"] == 2
    assert data["dispatched"]["rms_norm"] == "reference.torch"
    assert data["attention_backends"] == [
        "vllm_fl_reference.attention.backend:ReferenceAttentionBackend"
    ]
    assert "CPU time by origin" in page
    assert "vllm-fl profile: profiling" in progress


def test_a_model_with_weights_as_text():
    done = profile(
        TINY_MODEL, "--batch", 1, "--prompt-tokens", 5, "--output-tokens", 3, "--enforce-eager",
        "--kv-cache-memory-bytes", "64M",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, *_ = done.stdout.splitlines()
    assert first == f"{TINY_MODEL} on cpu: 1 requests of 5 + 3 tokens, bfloat16"
    assert "matrix product" in done.stdout
    assert "origin, share of CPU time" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worker-extension-cls", "a.B"], "vllm-fl: --worker-extension-cls is 'a.B'"),
        (["--no-such-argument"], "unrecognized arguments: --no-such-argument"),
        (["--max-model-len", "1000000"], "vllm-fl: vLLM refuses"),
    ],
)
def test_what_vllm_refuses_is_said_in_a_line(arguments, message):
    done = profile(TINY_MODEL, *arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
