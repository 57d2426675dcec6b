"""The dispatcher is in the model's path: what it is told changes what the model computes."""

from __future__ import annotations

import pytest

VENDOR = """
from vllm_fl.dispatch import BackendImplKind, BackendPriority, OpImpl

def silu_and_mul(x):
    import torch
    half = x.shape[-1] // 2
    {body}

def register_builtins(registry):
    registry.register_many([OpImpl(op_name="silu_and_mul", impl_id="vendor.acme",
        kind=BackendImplKind.VENDOR, fn=silu_and_mul, vendor="acme",
        priority=BackendPriority.VENDOR)])
"""
CHANGED = VENDOR.format(body="return torch.relu(x[..., :half]) * x[..., half:]")
FAILING = VENDOR.format(body="raise ArithmeticError('acme cannot')")


def generated(result):
    return [output["tokens"] for output in result["outputs"][0]]


def ran(result, op="silu_and_mul"):
    rows = [row for row in result["operators"][0] if row["op"] == op]
    return {row["implementation"]: row["calls"] for row in rows}


@pytest.fixture(scope="module")
def few(prompts):
    return prompts[8:12]


@pytest.fixture(scope="module")
def right(expected):
    return [continuation[:16] for continuation in expected[8:12]]


def run(vllm, model, prompts, env, **more):
    return vllm(model, prompts, new_tokens=16, env={**env, **more})


def test_a_vendor_s_operator_changes_the_output(vllm, tiny_model, few, right, plugin):
    result = run(vllm, tiny_model, few, plugin(CHANGED))
    assert generated(result) != right
    assert list(ran(result)) == ["vendor.acme"]
    assert ran(result)["vendor.acme"] > 0
    assert list(ran(result, "rms_norm")) == ["reference.torch"]


def test_denying_the_vendor_restores_it(vllm, tiny_model, few, right, plugin):
    result = run(vllm, tiny_model, few, plugin(CHANGED), VLLM_FL_DENY_VENDORS="acme")
    assert generated(result) == right
    assert list(ran(result)) == ["reference.torch"]


def test_a_failing_operator_falls_back_once_and_says_so_once(vllm, tiny_model, few, right, plugin):
    result = run(vllm, tiny_model, few, plugin(FAILING))
    assert generated(result) == right
    assert ran(result)["reference.torch"] > 0
    assert result["log"].count("vendor.acme of silu_and_mul is out until the policy changes") == 1
    assert "ArithmeticError: acme cannot" in result["log"]


def test_strict_stops_with_the_error(vllm, tiny_model, few, plugin):
    with pytest.raises(Exception, match="ArithmeticError: acme cannot") as caught:
        run(vllm, tiny_model, few, plugin(FAILING), VLLM_FL_STRICT="1")
    assert "in operator 'silu_and_mul', implementation 'vendor.acme'" in str(caught.value)


def test_the_debug_switch_prints_each_decision(vllm, tiny_model, few, plugin):
    result = run(
        vllm, tiny_model, few, plugin(CHANGED),
        VLLM_FL_DISPATCH_DEBUG="1", VLLM_FL_PER_OP="silu_and_mul=reference|vendor",
    )  # fmt: skip
    assert "silu_and_mul -> reference.torch (vllm-fl-reference" in result["log"]
    assert "then vendor.acme" in result["log"]
