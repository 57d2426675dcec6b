"""The dispatcher is in the model's path: what it is told changes what the model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import ENGINE, GREEDY, run_job

BOLT = Path(__file__).parent / "vendors" / "bolt"
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


def run(vllm, model, prompts, env, policy=None, **more):
    return vllm(model, prompts, new_tokens=16, env={**env, **more}, policy=policy)


def test_a_vendor_s_operator_changes_the_output(vllm, tiny_model, few, right, plugin):
    result = run(vllm, tiny_model, few, plugin(CHANGED))
    assert generated(result) != right
    assert list(ran(result)) == ["vendor.acme"]
    assert ran(result)["vendor.acme"] > 0
    assert list(ran(result, "rms_norm")) == ["reference.torch"]


def test_a_vendor_s_wheel_in_three_written_steps(vllm, tiny_model, few, right):
    env = {"PYTHONPATH": str(BOLT), "VLLM_FL_PLUGIN_MODULES": "vllm_fl_bolt.register_ops"}
    result = run(vllm, tiny_model, few, env, VLLM_FL_PREFER="vendor")
    assert generated(result) == right
    for op in ("silu_and_mul", "rms_norm"):
        assert list(ran(result, op)) == ["vendor.bolt"]
        assert ran(result, op)["vendor.bolt"] > 0


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


def test_a_policy_set_in_the_parent_reaches_the_worker(vllm, tiny_model, few, right, plugin):
    result = run(vllm, tiny_model, few, plugin(CHANGED), policy={"deny_vendors": ["acme"]})
    assert generated(result) == right
    assert list(ran(result)) == ["reference.torch"]


def test_comparison_operator_list_and_kept_layers(vllm, tiny_model, few, plugin, tmp_path):
    oplist = tmp_path / "ops.txt"
    result = run(
        vllm, tiny_model, few, plugin(CHANGED),
        VLLM_FL_COMPARE="silu_and_mul=reference,rotary_embedding=reference",
        VLLM_FL_OPLIST=str(oplist),
        VLLM_FL_OOT_BLACKLIST="rms_norm",
    )  # fmt: skip
    layers = {row["layer"]: row for row in result["differences"][0]}
    assert len(layers) == 4  # the rotary embedding is the yardstick itself
    assert layers["model.layers.3.mlp.act_fn"]["relative"] > 0.1
    assert all(row["calls"] > 10 for row in layers.values())
    assert sorted(oplist.read_text().splitlines()) == [
        "[DEBUG] vllm_fl.dispatch.ops.attention_backend: reference.torch",
        "[DEBUG] vllm_fl.dispatch.ops.rotary_embedding: reference.torch",
        "[DEBUG] vllm_fl.dispatch.ops.silu_and_mul: vendor.acme",
    ]
    assert ran(result, "rms_norm") == {"reference.torch": 0}
    assert "vLLM keeps its own layers for rms_norm: rms_norm is in oot_blacklist" in result["log"]


ATTENTION = """
from vllm_fl.dispatch import BackendImplKind, OpImpl

def attention_backend(use_mla=False, use_sparse=False):
    return "no_such_module:Backend"

def register_builtins(registry):
    registry.register_many([OpImpl(op_name="attention_backend", impl_id="vendor.acme",
        kind=BackendImplKind.VENDOR, fn=attention_backend, vendor="acme")])
"""


def test_an_attention_backend_that_cannot_be_loaded_gives_way_or_stops_a_strict_run(
    vllm, tiny_model, few, right, plugin
):
    result = run(vllm, tiny_model, few, plugin(ATTENTION))
    assert generated(result) == right
    assert "vendor.acme of attention_backend failed" in result["log"]
    assert "ReferenceAttentionBackend (reference.torch" in result["log"]
    with pytest.raises(Exception, match="Cannot import 'no_such_module'"):
        run(vllm, tiny_model, few, plugin(ATTENTION), VLLM_FL_STRICT="1")


IN_ONE_PROCESS = """
import json, sys
from vllm import LLM, SamplingParams
from vllm_fl.dispatch import get_policy, get_default_manager, with_denied_vendors

job = json.load(open(sys.argv[1]))
sampling = SamplingParams(**job["sampling"])
prompts = [{"prompt_token_ids": ids} for ids in job["batches"][0]]
found = []

def run(llm):
    manager = get_default_manager()
    manager.counters.reset()
    manager.count_calls()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    ran = [impl for (op, impl), n in manager.counters.calls.items() if n and op == "silu_and_mul"]
    found.append([ran, [list(o.outputs[0].token_ids) for o in outputs]])

if __name__ == "__main__":
    with with_denied_vendors("acme"):
        llm = LLM(**job["engine"])
    policy = get_policy().to_dict()
    run(llm)
    llm = None
    run(LLM(**job["engine"]))
    json.dump({"found": found, "policy": policy}, open(sys.argv[2], "w"))
"""


def test_a_context_around_an_engine_in_this_process_is_its_own(
    tiny_model, few, right, plugin, tmp_path
):
    (tmp_path / "script.py").write_text(IN_ONE_PROCESS)
    job = {
        "engine": {"model": str(tiny_model), "dtype": "float32", "enforce_eager": True, **ENGINE},
        "batches": [few],
        "sampling": {**GREEDY, "max_tokens": 16},
    }
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    env = {**plugin(CHANGED), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    result = run_job(str(tmp_path / "script.py"), job, jobs, **env)
    assert result["policy"]["deny_vendors"] == []
    (denied, tokens), (allowed, others) = result["found"]
    assert (denied, tokens) == (["reference.torch"], right)
    assert allowed == ["vendor.acme"]
    assert others != right
