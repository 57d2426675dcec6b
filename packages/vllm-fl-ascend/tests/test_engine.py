"""Stock vLLM on the CPU, every operator and attention through the emulated torch_npu."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from machine import HERE, make_machine

ROOT = HERE.parents[2]
TINY_MODEL = ROOT / "examples" / "tiny-qwen3"
LENGTHS = [1, 2, 7, 17, 33, 64, 127, 128, 150, 300]
NEW_TOKENS = 24
STATES = {"PREFILL_NO_CACHE", "PREFILL_CACHE_HIT", "CHUNKED_PREFILL", "DECODE_ONLY"}


@pytest.fixture(scope="module")
def prompts():
    """Stretches of a text, of one token to more than two blocks."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    text = (TINY_MODEL / "README.md").read_text() + Path(argparse.__file__).read_text()
    ids = tokenizer.encode(text).ids
    return [ids[7 * i : 7 * i + n] for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """Run batches of prompts in vLLM on the Ascend backend."""

    def run(model, *batches, policy=None, **engine):
        machine = make_machine(tmp_path_factory.mktemp("machine"))
        job = {
            "engine": {
                "model": str(model), "dtype": "float16", "max_model_len": 512,
                "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 28,
                "skip_tokenizer_init": True, **engine,
            },
            "batches": batches,
            "new_tokens": NEW_TOKENS,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-P", str(HERE / "engine.py"), json.dumps(job)],
            env={
                **os.environ, **machine, "OMP_NUM_THREADS": "1",
                "VLLM_FL_PLUGIN_MODULES": "ascend_on_cpu", "VLLM_FL_PLATFORM": "ascend",
                "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **(policy or {}),
            },
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        (result,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
        return json.loads(result.removeprefix("RESULT"))

    return run


def transformers(folder, model, prompts):
    """Return what transformers generates in fp32."""
    job, result = folder / "job.json", folder / "result.json"
    wanted = {"model": str(model), "dtype": "float32", "prompts": prompts}
    job.write_text(json.dumps({**wanted, "new_tokens": NEW_TOKENS}))
    subprocess.run(
        [sys.executable, "-P", str(ROOT / "tests/run_transformers.py"), str(job), str(result)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return json.loads(result.read_text())["tokens"]


def only_ascend(result, *operators):
    """Check that these operators were called, all through the Ascend backend."""
    calls = {name: count for name, count in result["calls"].items() if count}
    others = {name for name in calls if not name.endswith(" vendor.ascend")}
    assert others == set()
    assert {name.split()[0] for name in calls} == set(operators)
    assert all(count > 50 for count in calls.values()), calls
    assert result["platform"] == "ascend_platform_on_cpu.AscendOnCpu"


def test_the_tiny_model_generates_the_reference_tokens(vllm, prompts, tmp_path):
    """Prompts in chunks, beside others that decode; then with their prefixes cached."""
    expected = transformers(tmp_path, TINY_MODEL, prompts)
    result = vllm(TINY_MODEL, prompts, prompts, prompts[-1:], max_num_batched_tokens=96)
    assert result["tokens"] == [expected, expected, expected[-1:]]
    assert result["cached"][0] == [0] * len(LENGTHS)
    assert result["cached"][1] == [(n - 1) // 128 * 128 for n in LENGTHS]
    assert set(result["attention"]) == STATES
    only_ascend(result, "silu_and_mul", "rms_norm", "rotary_embedding")


# model -> the operators that its forward pass goes through
LAYERS = {"rms_norm", "silu_and_mul", "rotary_embedding"}
MODELS = {
    "mistral": LAYERS,
    "glm4_moe": LAYERS | {"grouped_topk", "fused_experts"},
    "qwen3_moe": LAYERS | {"topk_softmax", "fused_experts"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, "-P", str(HERE / "ascend_models.py"), str(folder)], check=True)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_other_layers_generate_what_plain_pytorch_does(vllm, models, name):
    """Sliding windows, expert groups, partial rotary; both runs are in fp16.

    With random weights two tokens may be nearly tied. One text of the five may part there, after
    its first token; plain PyTorch in fp16 and in fp32 part in one of them, too.
    """
    draw = random.Random(3)
    prompts = [[draw.randrange(5, 500) for _ in range(n)] for n in (1, 5, 33, 100, 150)]
    engine = {"max_num_batched_tokens": 96}
    result = vllm(models / name, prompts, **engine)
    plain = vllm(models / name, prompts, policy={"VLLM_FL_PREFER": "reference"}, **engine)
    assert not any(plain["calls"].get(f"{op} vendor.ascend") for op in MODELS[name])
    assert plain["attention"] == {}
    pairs = list(zip(result["tokens"][0], plain["tokens"][0], strict=True))
    assert [ours[0] for ours, _ in pairs] == [theirs[0] for _, theirs in pairs]
    assert sum(ours == theirs for ours, theirs in pairs) >= len(pairs) - 1
    only_ascend(result, *MODELS[name])
