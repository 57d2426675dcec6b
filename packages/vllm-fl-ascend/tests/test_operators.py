"""The operators on the emulated torch_npu: values, reasons of refusals, and both versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st
from machine import EMULATOR

from vllm_fl_ascend import device
from vllm_fl_ascend.backend import AscendBackend
from vllm_fl_ascend.ops import activation, cache, experts, norm, rotary, routing
from vllm_fl_reference.ops import activation as plain_activation
from vllm_fl_reference.ops import cache as plain_cache
from vllm_fl_reference.ops import moe as plain_moe
from vllm_fl_reference.ops import norm as plain_norm
from vllm_fl_reference.ops import rotary as plain_rotary
from vllm_fl_reference.ops import routing as plain_routing

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
dtypes = st.sampled_from(list(TOLERANCES))
halves = st.sampled_from([torch.float16, torch.bfloat16])
seeds = st.integers(0, 1000)


def close(ours, theirs):
    tolerance = TOLERANCES[theirs.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(seeds, dtypes, st.integers(1, 5), st.integers(1, 70), st.sampled_from(["none", "tanh"]))
def test_gated_activations(seed, dtype, rows, width, approximate):
    wide = normal(seed, rows, 2 * width + 3, dtype=dtype)
    for x in (wide[:, : 2 * width], wide[:, 3:]):  # rows with a gap between them
        close(activation.silu_and_mul(x), plain_activation.silu_and_mul(x))
        close(
            activation.gelu_and_mul(x, approximate), plain_activation.gelu_and_mul(x, approximate)
        )


@given(seeds, dtypes, st.booleans(), st.integers(1, 5), st.integers(1, 90))
def test_norms(seed, dtype, with_residual, rows, width):
    x, weight = normal(seed, rows, 2, width, dtype=dtype), 1 + normal(seed + 1, width, dtype=dtype)
    residual = normal(seed + 2, rows, 2, width, dtype=dtype) if with_residual else None
    for name in ("rms_norm", "gemma_rms_norm"):
        ours = getattr(norm, name)(x, residual, weight, 1e-5)
        theirs = getattr(plain_norm, name)(x, residual, weight, 1e-5)
        pairs = zip(ours, theirs, strict=True) if with_residual else [(ours, theirs)]
        for one, other in pairs:
            close(one, other)


@given(seeds, dtypes, st.booleans(), st.integers(1, 6), st.sampled_from([32, 64, 96]))
def test_rotary(seed, dtype, neox, tokens, rotary_dim):
    packed = normal(seed, tokens, 8 * 96, dtype=dtype)
    query, key, _ = (x.view(tokens, -1, 96) for x in packed.split([4 * 96, 2 * 96, 2 * 96], dim=1))
    cos, sin = normal(seed + 1, 50, rotary_dim, dtype=dtype).chunk(2, dim=-1)
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(seed))
    call = (query, key, cos, sin, positions, neox)
    assert rotary.rotary_embedding_supports(*call) is True
    before = packed.clone()
    for ours, theirs in zip(
        rotary.rotary_embedding(*call), plain_rotary.rotary_embedding(*call), strict=True
    ):
        close(ours, theirs)
        assert torch.equal(ours[..., rotary_dim:], theirs[..., rotary_dim:])
    assert torch.equal(packed, before)


@given(seeds, dtypes, st.integers(1, 6), st.integers(1, 30), st.booleans(), st.data())
def test_topk_softmax(seed, dtype, tokens, count, renormalize, data):
    k = data.draw(st.integers(1, count))
    logits = normal(seed, tokens, count, dtype=dtype)
    results = []
    for function in (routing.topk_softmax, plain_routing.topk_softmax):
        outputs = [torch.empty(tokens, k, dtype=t) for t in (torch.float32, torch.int64,
                                                             torch.int32)]  # fmt: skip
        function(*outputs, logits, renormalize)
        results.append(outputs)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@given(seeds, dtypes, st.integers(1, 6), st.booleans(), st.sampled_from([1.0, 2.5]), st.data())
def test_grouped_topk(seed, dtype, tokens, biased, scale, data):
    groups, size = data.draw(st.tuples(st.integers(1, 5), st.integers(3, 8)))
    chosen = data.draw(st.integers(1, groups))
    k = data.draw(st.integers(1, chosen * size))
    scores = normal(seed, tokens, groups * size, dtype=dtype)
    bias = normal(seed + 1, groups * size) if biased else None
    call = (scores, groups, chosen, k, True, scale, bias, 1)
    assert routing.grouped_topk_supports(*call) is True
    ours, theirs = routing.grouped_topk(*call), plain_routing.grouped_topk(*call)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@given(seeds, halves, st.integers(1, 7), st.integers(1, 6), st.booleans(),
       st.sampled_from(["silu", "gelu"]), st.data())  # fmt: skip
def test_fused_experts(seed, dtype, tokens, count, mapped, act, data):
    k = data.draw(st.integers(1, count))
    random = torch.Generator().manual_seed(seed)
    total = 2 * count if mapped else count
    expert_map = None
    if mapped:  # any half of all experts, in any order
        expert_map = torch.full((total,), -1, dtype=torch.int32)
        expert_map[torch.randperm(total, generator=random)[:count]] = torch.arange(count).int()
    ids = torch.randint(-1, total + 1, (tokens, k), generator=random)
    call = (
        normal(seed, tokens, 24, dtype=dtype),
        normal(seed + 1, count, 32, 24, dtype=dtype) / 5,
        normal(seed + 2, count, 24, 16, dtype=dtype) / 4,
        torch.rand(tokens, k, generator=random),
        ids,
        act,
        k == 1 and data.draw(st.booleans()),
        total if mapped else -1,
        expert_map,
    )
    assert experts.fused_experts_supports(*call) is True
    close(experts.fused_experts(*call), plain_moe.fused_experts(*call))


@given(seeds, dtypes, st.integers(0, 9), st.integers(0, 3))
def test_cache_write(seed, dtype, tokens, more):
    key, value = (normal(seed + i, tokens + more, 2, 16, dtype=dtype) for i in (0, 1))
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(seed))[:tokens]
    slots[::3] = -1
    caches = [normal(seed + i, 3, 16, 2, 16, dtype=dtype) for i in (2, 3)]
    expected = [x.clone() for x in caches]
    assert cache.reshape_and_cache_flash_supports(key, value, *caches, slots) is True
    cache.reshape_and_cache_flash(key, value, *caches, slots)
    plain_cache.reshape_and_cache_flash(key, value, *expected, slots)
    for ours, theirs in zip(caches, expected, strict=True):
        assert torch.equal(ours, theirs)


def rotary_call(**changes):
    cos, sin = normal(1, 9, 64).chunk(2, dim=-1)
    call = {
        "query": normal(2, 3, 4, 64), "key": normal(3, 3, 2, 64), "cos": cos, "sin": sin,
        "position_ids": torch.arange(3), "is_neox_style": True,
    }  # fmt: skip
    return {**call, **changes}


def gate(experts=8, k=2, dtype=torch.float32):
    outputs = [torch.empty(3, k) for _ in range(3)]
    return (*outputs, normal(1, 3, experts, dtype=dtype))


def expert_call(**changes):
    call = {
        "hidden_states": normal(1, 3, 8, dtype=torch.float16),
        "w1": normal(2, 2, 8, 8, dtype=torch.float16),
        "w2": normal(3, 2, 8, 4, dtype=torch.float16),
        "topk_weights": torch.rand(3, 2),
        "topk_ids": torch.zeros(3, 2, dtype=torch.int32),
    }
    return {**call, **changes}


SCORES = normal(1, 3, 16)
CACHE = normal(1, 2, 16, 2, 8)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: activation.silu_and_mul_supports(normal(0, *[1] * 9)), "9 dimensions"),
        (lambda: activation.silu_and_mul_supports(normal(0, 0, 8)), "x is empty"),
        (lambda: activation.silu_and_mul_supports(normal(0, 2, 7)), "7 columns"),
        (lambda: norm.rms_norm_supports(
            normal(0, 2, 8), None, normal(0, 7), 1e-5), "the weight the shape [7]"),
        (lambda: norm.rms_norm_supports(
            normal(0, 2, 8), normal(0, 1, 8), normal(0, 8), 1e-5), "the residual [1, 8]"),
        (lambda: routing.grouped_topk_supports(SCORES, 0, 1, 2, True, 1.0, None, 1), "0 equal"),
        (lambda: routing.grouped_topk_supports(
            SCORES, 4, 2, 2, True, 1.0, SCORES[0, :8], 1), "the bias has the shape [8]"),
        (lambda: rotary.rotary_embedding_supports(
            **rotary_call(query=normal(2, 3, 256))), "2 and 3 dimensions, not 3"),
        (lambda: activation.gelu_and_mul_supports(normal(0, 2, 8), "fast"), "approximate='fast'"),
        (lambda: norm.rms_norm_supports(normal(0, 8), None, normal(0, 8), 1e-5), "1 dimensions"),
        (lambda: norm.rms_norm_supports(
            normal(0, 2, 8), None, normal(0, 8).half(), 1e-5), "the weight torch.float16"),
        (lambda: norm.gemma_rms_norm_supports(
            normal(0, 2, 8), normal(0, 2, 8).half(), normal(0, 8), 1e-5), "the residual"),
        (lambda: rotary.rotary_embedding_supports(**rotary_call(key=None)), "there is no key"),
        (lambda: rotary.rotary_embedding_supports(
            **rotary_call(key=normal(3, 3, 2, 80))), "head size"),
        (lambda: rotary.rotary_embedding_supports(
            **rotary_call(cos=normal(1, 9, 32), sin=normal(2, 9, 32))), "halves of one cache"),
        (lambda: rotary.rotary_embedding_supports(
            **dict(zip(("cos", "sin"), normal(1, 9, 24).chunk(2, -1), strict=True)),
            **{k: v for k, v in rotary_call().items() if k not in ("cos", "sin")}),
         "rotary_dim 24 is not a multiple of 16"),
        (lambda: rotary.rotary_embedding_supports(
            **rotary_call(query=normal(2, 3, 4, 64).half(), key=normal(3, 3, 2, 64).half())),
         "the cache torch.float32"),
        (lambda: routing.topk_softmax_supports(*gate(2000, 1025)), "k is 1025"),
        (lambda: routing.topk_softmax_supports(*gate(dtype=torch.float64)), "float64"),
        (lambda: routing.grouped_topk_supports(SCORES, 4, 2, 2, True, 1.0, None, 0), "as they are"),
        (lambda: routing.grouped_topk_supports(SCORES, 4, 2, 2, False, 1.0, None, 1), "divides"),
        (lambda: routing.grouped_topk_supports(SCORES, 8, 2, 2, True, 1.0, None, 1), "8 equal"),
        (lambda: routing.grouped_topk_supports(
            normal(1, 3, 400), 100, 2, 2, True, 1.0, None, 1), "more than 2048 when padded"),
        (lambda: experts.fused_experts_supports(
            **expert_call(apply_router_weight_on_input=True)), "several experts"),
        (lambda: experts.fused_experts_supports(
            **expert_call(w1=normal(2, 2, 8, 8))), "the weights torch.float32"),
        (lambda: experts.fused_experts_supports(
            **expert_call(w1=torch.empty(1, 65536, 8, dtype=torch.float16))), "below 65536"),
        (lambda: cache.reshape_and_cache_flash_supports(
            CACHE[0], CACHE[0], CACHE, CACHE.transpose(1, 2), torch.arange(16)), "not contiguous"),
    ],
)  # fmt: skip
def test_reasons(answer, reason):
    assert reason in answer()


def test_tensors_elsewhere_are_declined(monkeypatch):
    monkeypatch.setattr(device, "DEVICE", "npu")
    x = normal(0, 2, 8)
    for answer in (
        activation.silu_and_mul_supports(x),
        activation.gelu_and_mul_supports(x),
        norm.rms_norm_supports(x, None, x[0], 1e-5),
        rotary.rotary_embedding_supports(**rotary_call()),
        routing.topk_softmax_supports(*gate()),
        routing.grouped_topk_supports(SCORES, 4, 2, 2, True, 1.0, None, 1),
        experts.fused_experts_supports(**expert_call()),
        cache.reshape_and_cache_flash_supports(CACHE[0], CACHE[0], CACHE, CACHE, torch.arange(16)),
    ):
        assert "not on an NPU" in answer


def test_each_operator_calls_the_vendor_s(monkeypatch):
    """What runs is torch_npu's: without it nothing is computed another way."""
    for name in [n for n in dir(torch_npu) if n.startswith("npu_")]:
        monkeypatch.delattr(torch_npu, name)
    x = normal(0, 3, 8, dtype=torch.float16)
    calls = [
        lambda: activation.silu_and_mul(x),
        lambda: activation.gelu_and_mul(x),
        lambda: norm.rms_norm(x, None, x[0], 1e-5),
        lambda: norm.rms_norm(x, x, x[0], 1e-5),
        lambda: norm.gemma_rms_norm(x, None, x[0], 1e-5),
        lambda: rotary.rotary_embedding(**rotary_call()),
        lambda: routing.topk_softmax(*gate()),
        lambda: routing.grouped_topk(SCORES, 4, 2, 2, True, 1.0, None, 1),
        lambda: experts.fused_experts(**expert_call()),
        lambda: cache.reshape_and_cache_flash(CACHE[0], CACHE[0], CACHE, CACHE, torch.arange(16)),
    ]
    assert len(calls) == len(AscendBackend.operators)  # two norms, and attention elsewhere
    for call in calls:
        with pytest.raises(AttributeError, match="npu_"):
            call()


CALLS = """
import json, torch, torch_npu
from vllm_fl_ascend.ops import routing
scores = torch.randn(3, 16)
weights, ids = routing.grouped_topk(scores, 4, 2, 2, True, 1.0, torch.randn(16), 1)
print(json.dumps([torch_npu.__version__, list(weights.shape), weights.sum(1).tolist()]))
"""


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0"])
def test_the_schemas_of_either_version_take_the_call_that_they_differ_in(version):
    done = subprocess.run(
        [sys.executable, "-P", "-c", CALLS],
        env={**os.environ, "PYTHONPATH": str(EMULATOR), "EMULATED_TORCH_NPU": version},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said, shape, sums = json.loads(done.stdout.splitlines()[-1])
    assert (said, shape) == (version, [3, 2])
    assert sums == pytest.approx([1, 1, 1])


def test_nothing_else_of_the_project_names_this_backend():
    """The second chip is a wheel of its own."""
    root = Path(__file__).parents[3]
    folders = (root / "packages").glob("*/src")
    others = [folder for folder in folders if folder.parent.name != "vllm-fl-ascend"]
    assert len(others) >= 3
    named = [
        str(path)
        for folder in others
        for path in folder.rglob("*.py")
        if any(word in path.read_text() for word in ("torch_npu", "torch-npu", "Ascend", "npu_"))
    ]
    assert named == []
