"""Stock vLLM on the CPU, every operator and attention through the emulated torch_npu."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from machine import HERE, make_machine

TINY_MODEL = HERE.parents[2] / "examples" / "tiny-qwen3"
NEW_TOKENS = 24
STATES = {"PREFILL_NO_CACHE", "PREFILL_CACHE_HIT", "CHUNKED_PREFILL", "DECODE_ONLY"}

# model -> the operators that its forward pass goes through
LAYERS = {"rms_norm", "silu_and_mul", "rotary_embedding"}
MODELS = {
    "tiny": LAYERS,
    "mistral": LAYERS,
    "glm4_moe": LAYERS | {"grouped_topk", "fused_experts"},
    "qwen3_moe": {"rms_norm", "rotary_embedding", "topk_softmax", "fused_experts"},
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Of each model its folder, prompts, and what transformers generates in fp32."""
    folder = tmp_path_factory.mktemp("models")
    script = [sys.executable, "-P", str(HERE / "ascend_models.py"), str(folder), str(TINY_MODEL)]
    subprocess.run(script, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    return json.loads((folder / "expected.json").read_text())


@pytest.fixture(scope="module")
def results(expected, tmp_path_factory):
    """What vLLM generates in fp16 on the Ascend backend, with prompts in chunks.

    All prompts in a batch, then again with their prefixes cached, then the last one alone.
    """
    jobs = [
        {
            "engine": {
                "model": model["model"], "dtype": "float16", "max_model_len": 512,
                "max_num_seqs": 16, "max_num_batched_tokens": 96,
                "kv_cache_memory_bytes": 1 << 28, "skip_tokenizer_init": True,
            },
            "batches": [model["prompts"], model["prompts"], model["prompts"][-1:]],
            "new_tokens": NEW_TOKENS,
        }
        for model in expected.values()
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / "engine.py"), json.dumps(jobs)],
        env={
            **os.environ, **make_machine(tmp_path_factory.mktemp("machine")),
            "OMP_NUM_THREADS": "1", "VLLM_FL_PLUGIN_MODULES": "ascend_on_cpu",
            "VLLM_FL_PLATFORM": "ascend", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return dict(zip(expected, json.loads(line.removeprefix("RESULT")), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_generates_the_reference_tokens(expected, results, name):
    """Sliding windows, expert groups, partial rotary; chunks of prompts beside others' decodes."""
    model, result = expected[name], results[name]
    assert model["margin"] > 0.02, "a token is nearly tied: rounding may decide"
    assert result["tokens"] == [model["tokens"], model["tokens"], model["tokens"][-1:]]
    assert result["cached"][0] == [0] * len(model["prompts"])
    assert result["cached"][1] == [(len(p) - 1) // 128 * 128 for p in model["prompts"]]
    assert set(result["attention"]) == STATES


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_is_the_vendor_s(results, name):
    calls = results[name]["calls"]
    assert set(calls) == {f"{op} vendor.ascend" for op in MODELS[name]}
    assert all(count > 50 for count in calls.values()), calls
    assert results[name]["platform"] == "ascend_platform_on_cpu.AscendOnCpu"
