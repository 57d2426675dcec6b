"""Stock vLLM with one attention for steps of pure decode and another for all others."""

from __future__ import annotations

import itertools
import json

import pytest

NEW_TOKENS = 6

# Two implementations that do what the reference does and write down the steps that they ran.
RECORDED = """
import json, os
from vllm_fl.dispatch import BackendImplKind, OpImpl

def register_builtins(registry):
    for name in ("one", "two", *(["three"] if os.environ.get("THREE") else [])):
        registry.register_impl(OpImpl("attention_backend", f"vendor.{name}",
            BackendImplKind.VENDOR, f"recorded:{name}", vendor=name))
"""
BACKENDS = """
import json, os
import vllm_fl_reference.attention.backend as reference

def one(use_mla=False, use_sparse=False):
    return "recorded:One"

def two(use_mla=False, use_sparse=False):
    return "recorded:Two"

def recording(name):
    class Impl(reference.ReferenceAttentionImpl):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs):
            if attn_metadata is not None:
                starts = attn_metadata.query_start
                lengths = [end - start for start, end in zip(starts, starts[1:])]
                with open(os.environ["STEPS"], "a") as file:
                    file.write(json.dumps([name, max(lengths), len(lengths)]) + "\\n")
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs
            )

    class Backend(reference.ReferenceAttentionBackend):
        get_impl_cls = staticmethod(lambda: Impl)

    return Backend

One, Two = recording("one"), recording("two")
"""
OTHER_LAYOUT = """
class Two(One):
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, dtype="auto"):
        return (2, num_blocks, block_size, num_kv_heads, head_size)
"""


@pytest.fixture
def recorded(plugin, tmp_path):
    """The environment of both, decode's first; what their steps are written to."""
    (tmp_path / "recorded.py").write_text(BACKENDS)
    env = plugin(RECORDED)
    env["STEPS"] = str(tmp_path / "steps")
    env["VLLM_FL_PER_OP"] = "attention_backend.decode=vendor:one;attention_backend.prefill=vendor"
    return env


def test_decode_and_prefill_are_two_implementations(
    vllm, tiny_model, prompts, expected, recorded, tmp_path
):
    """Long prompts in chunks beside requests that decode; then all of them decode."""
    chosen = [1, 6, 12]
    recorded["VLLM_FL_PER_OP"] += ":two"
    result = vllm(
        tiny_model, [prompts[i] for i in chosen],
        new_tokens=NEW_TOKENS, env=recorded, max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )  # fmt: skip
    assert [output["tokens"] for output in result["outputs"][0]] == [
        expected[i][:NEW_TOKENS] for i in chosen
    ]
    lines = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    # A step with more requests than there are is vLLM's, to warm up.
    steps = {(name, longest > 1, n) for name, longest, n in lines if n <= len(chosen)}
    assert ("one", False, 3) in steps
    assert ("two", True, 3) in steps  # requests that decode beside a chunk of a prompt
    assert {(name, several) for name, several, _ in steps} == {("one", False), ("two", True)}
    used = {row["op"]: row["implementation"] for row in result["operators"][0]}
    assert used["attention_backend.decode"] == "vendor.one"
    assert used["attention_backend.prefill"] == "vendor.two"
    assert "Attention backend for decode: recorded.One (vendor.one, by hand)" in result["log"]
    assert "Attention backend for prefill: recorded.Two (vendor.two, by hand)" in result["log"]


def test_layouts_that_differ_are_refused(vllm, tiny_model, prompts, recorded, tmp_path):
    """Named alone it is an error; with another one named after it, that one runs in both phases."""
    (tmp_path / "recorded.py").write_text(BACKENDS + OTHER_LAYOUT)
    wanted = recorded["VLLM_FL_PER_OP"]
    with pytest.raises(Exception, match="they lay the cache out in different ways: its shape is"):
        vllm(tiny_model, prompts[:1], env={**recorded, "VLLM_FL_PER_OP": f"{wanted}:two"})
    fall_back = {**recorded, "VLLM_FL_PER_OP": f"{wanted}:two|vendor:one"}
    result = vllm(tiny_model, prompts[:1], new_tokens=2, env=fall_back)
    assert "decode:vendor.one+prefill:vendor.two is not used: they lay the cache" in result["log"]
    assert "Attention backend: recorded.One (vendor.one, by hand)" in result["log"]


THREE = """
class Three(One):
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, dtype="auto"):
        return (2, num_blocks, block_size, num_kv_heads, head_size)

def three(use_mla=False, use_sparse=False):
    return "recorded:Three"
"""


def test_a_live_engine_changes_its_attention(
    vllm, tiny_model, prompts, expected, recorded, tmp_path
):
    """As the tuner's does: each phase, and back; what the cache cannot serve is refused."""
    (tmp_path / "recorded.py").write_text(BACKENDS + THREE)
    recorded |= {"VLLM_FL_PER_OP": "attention_backend=vendor:one", "THREE": "1"}
    chosen = [1, 6, 12]
    pairs = [("one", "two"), ("two", "one"), ("two", "two"), ("one", "three"), ("one", "one")]

    def policy(decode, prefill):
        orders = {"decode": [f"vendor:{decode}"], "prefill": [f"vendor:{prefill}"]}
        return {"strict": True, "per_op_order": {"attention_backend": orders}}

    result = vllm(
        tiny_model, *[[prompts[i] for i in chosen]] * 6,
        new_tokens=NEW_TOKENS, env=recorded, enforce_eager=True, enable_prefix_caching=False,
        additional_config={"vllm_fl": {"live_attention": True}},
        live=[None, *(policy(*pair) for pair in pairs)],
    )  # fmt: skip
    for outputs in result["outputs"]:
        assert [o["tokens"] for o in outputs] == [expected[i][:NEW_TOKENS] for i in chosen]
    bound = result["bound"]
    assert "chooses vendor.three for the attention of prefill" in bound[3]
    assert "they lay the cache out in different ways: its shape is" in bound[3]
    assert [answer["attention_backend"] for answer in (*bound[:3], bound[4])] == [
        "decode:vendor.one+prefill:vendor.two", "decode:vendor.two+prefill:vendor.one",
        "vendor.two", "vendor.one",
    ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    steps = [(name, longest > 1) for name, longest, n in lines if n <= len(chosen)]
    served = [step for step, _ in itertools.groupby(steps)]
    pairs[3] = pairs[2]  # the refused one changed nothing
    assert served[-12:] == [
        step
        for decode, prefill in [("one", "one"), *pairs]
        for step in ((prefill, True), (decode, False))
    ]
    rows = {row["op"]: row["implementation"] for row in result["operators"][0]}
    assert rows["attention_backend"] == "vendor.one"  # of both phases
