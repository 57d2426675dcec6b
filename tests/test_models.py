"""Models that differ in norm, activation, rotary style, window and direction of attention."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

# model -> the operators that its forward pass must go through
OPERATORS = {
    "gemma2": {"gemma_rms_norm", "gelu_and_mul", "rotary_embedding"},
    "glm4": {"rms_norm", "silu_and_mul", "rotary_embedding"},
    "stablelm": {"silu_and_mul", "rotary_embedding"},
    "mistral": {"rms_norm", "silu_and_mul", "rotary_embedding"},
    "llama3": {"rms_norm", "silu_and_mul", "rotary_embedding"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    script = Path(__file__).with_name("make_models.py")
    subprocess.run([sys.executable, "-P", str(script), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def random_prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(5, 500) for _ in range(n)] for n in (1, 5, 16, 17, 33, 100, 150)]


@pytest.mark.parametrize("name", OPERATORS)
def test_greedy_tokens(vllm, transformers, models, random_prompts, name):
    expected = transformers(models / name, random_prompts, 24)["tokens"]
    result = vllm(models / name, random_prompts, new_tokens=24, max_num_batched_tokens=64)
    assert [output["tokens"] for output in result["outputs"][0]] == expected
    called = {row["op"] for row in result["operators"][0] if row["calls"]}
    assert called - {"attention_backend"} == OPERATORS[name]


def test_an_encoder(vllm, transformers, models, random_prompts):
    expected = transformers(models / "bert", random_prompts)["embeddings"]
    result = vllm(
        models / "bert", random_prompts, embed=True, runner="pooling", skip_tokenizer_init=False
    )
    for ours, theirs in zip(result["outputs"][0], expected, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
