"""Stock vLLM with one attention for steps of pure decode and another for all others."""

from __future__ import annotations

import json

import pytest

NEW_TOKENS = 6

# Two implementations that do what the reference does and write down the steps that they ran.
RECORDED = """
import json, os
from vllm_fl.dispatch import BackendImplKind, OpImpl

def register_builtins(registry):
    for name in ("one", "two"):
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
