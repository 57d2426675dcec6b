"""Mixture-of-experts models: routing and experts through dispatched operators."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

# model -> the operators that its experts must go through
OPERATORS = {
    "qwen3_moe": {"topk_softmax", "fused_experts"},
    "qwen2_moe": {"topk_softmax", "fused_experts"},
    "mixtral": {"topk_softmax", "fused_experts"},
    "glm4_moe": {"grouped_topk", "fused_experts"},
}
ROUTING = {"topk_softmax", "grouped_topk", "fused_experts"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    script = Path(__file__).with_name("make_models.py")
    subprocess.run([sys.executable, "-P", str(script), str(folder), *OPERATORS], check=True)
    return folder


@pytest.fixture(scope="module")
def random_prompts() -> list[list[int]]:
    draw = random.Random(2)
    return [[draw.randrange(5, 500) for _ in range(n)] for n in (1, 5, 16, 17, 33, 100, 150)]


@pytest.fixture(scope="module")
def expected(transformers, models, random_prompts):
    """Return what transformers generates with a model, once a model."""
    known = {}

    def tokens(name: str) -> list[list[int]]:
        if name not in known:
            known[name] = transformers(models / name, random_prompts, 24)["tokens"]
        return known[name]

    return tokens


def generated(result):
    return [output["tokens"] for output in result["outputs"][0]]


def called(worker):
    return {row["op"] for row in worker if row["calls"]} & ROUTING


@pytest.mark.parametrize("name", OPERATORS)
def test_greedy_tokens(vllm, models, random_prompts, expected, name):
    """In one batch, with prompts in several chunks."""
    result = vllm(models / name, random_prompts, new_tokens=24, max_num_batched_tokens=64)
    assert generated(result) == expected(name)
    assert called(result["operators"][0]) == OPERATORS[name]


@pytest.mark.parametrize("experts", [False, True], ids=["sliced", "expert_parallel"])
def test_two_workers(vllm, models, random_prompts, expected, experts):
    """Each with a slice of every expert, or with every expert of its half and an expert map."""
    result = vllm(
        models / "qwen3_moe", random_prompts, new_tokens=24, max_num_batched_tokens=64,
        tensor_parallel_size=2, enable_expert_parallel=experts,
    )  # fmt: skip
    assert generated(result) == expected("qwen3_moe")
    assert [called(worker) for worker in result["operators"]] == [OPERATORS["qwen3_moe"]] * 2


VENDOR = """
from vllm_fl.dispatch import BackendImplKind, BackendPriority, OpImpl

def topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output,
                 renormalize=False):
    topk_weights.fill_(7.0)
    topk_indices.fill_(0)
    raise ArithmeticError("acme cannot")

def register_builtins(registry):
    registry.register_many([OpImpl(op_name="topk_softmax", impl_id="vendor.acme",
        kind=BackendImplKind.VENDOR, fn=topk_softmax, vendor="acme",
        priority=BackendPriority.VENDOR)])
"""


def test_routing_that_fails_half_way_is_done_again(vllm, models, random_prompts, expected, plugin):
    result = vllm(models / "qwen3_moe", random_prompts, new_tokens=24, env=plugin(VENDOR))
    assert generated(result) == expected("qwen3_moe")
    assert "vendor.acme of topk_softmax is out until the policy changes" in result["log"]
