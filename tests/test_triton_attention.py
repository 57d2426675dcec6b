"""Stock vLLM on the CPU platform with the Triton attention, interpreted.

The session ``tests`` of vllm-fl-flaggems runs these; where that wheel is not installed they are
skipped.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_fl_flaggems")

NEW_TOKENS = 4
LAYERS = 4
BACKEND = "vllm_fl_flaggems.attention.backend.AttentionFLBackend"
TRITON = {
    "TRITON_INTERPRET": "1",
    "VLLM_FL_PREFER": "reference",  # all but the attention, which is slow enough
    "VLLM_FL_PER_OP": "attention_backend=flagos;reshape_and_cache_flash=flagos",
}
BY_PHASE = (
    "attention_backend.decode=flagos;attention_backend.prefill=reference;"
    "reshape_and_cache_flash=flagos"
)


@pytest.fixture
def generate(vllm, tiny_model, prompts, expected):
    """Generate with long prompts, in chunks of 64 tokens beside requests that decode already."""

    def run(env):
        chosen = [0, 6, 12]
        result = vllm(
            tiny_model, [prompts[i] for i in chosen],
            new_tokens=NEW_TOKENS, env=env, max_num_batched_tokens=64, enable_prefix_caching=False,
        )  # fmt: skip
        assert [output["tokens"] for output in result["outputs"][0]] == [
            expected[i][:NEW_TOKENS] for i in chosen
        ]
        return result

    return run


def test_chunked_prefill_beside_decodes(generate):
    """One implementation throughout."""
    result = generate(TRITON)
    assert f"Attention backend: {BACKEND} (default.flagos" in result["log"]
    assert f"Warmed up: attention of {LAYERS} layers; steps of [] tokens" in result["log"]
    used = {row["op"]: row["implementation"] for row in result["operators"][0]}
    calls = {row["op"]: row["calls"] for row in result["operators"][0]}
    assert used["reshape_and_cache_flash"] == "default.flagos"
    assert calls["reshape_and_cache_flash"] > NEW_TOKENS
    assert used["rms_norm"] == "reference.torch"


def test_decode_and_prefill_by_different_implementations(generate):
    """Decode by Triton, prefill by plain PyTorch; a step with both is prefill."""
    result = generate({**TRITON, "VLLM_FL_PER_OP": BY_PHASE})
    assert f"Attention backend for decode: {BACKEND} (default.flagos" in result["log"]
    assert f"Warmed up: attention of {LAYERS} layers; steps of [] tokens" in result["log"]
    assert "Attention backend for prefill: vllm_fl_reference.attention" in result["log"]
    used = {row["op"]: row["implementation"] for row in result["operators"][0]}
    assert used["attention_backend.decode"] == "default.flagos"
    assert used["attention_backend.prefill"] == "reference.torch"
    assert "attention_backend" not in used
