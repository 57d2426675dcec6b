"""Stock vLLM on the CPU platform generates what transformers does, token for token."""

from __future__ import annotations

import pytest

PLATFORM = "vllm_fl_reference.platform.CpuPlatformFL"
BLOCK = 16


def tokens(batch):
    return [output["tokens"] for output in batch]


def calls(result, worker=0):
    return {row["op"]: row["calls"] for row in result["operators"][worker]}


def test_one_batch_and_one_at_a_time(vllm, tiny_model, prompts, expected):
    singles = [[prompt] for prompt in prompts]
    result = vllm(tiny_model, prompts, *singles, enable_prefix_caching=False)
    batch, *alone = result["outputs"]
    assert tokens(batch) == expected
    assert [tokens(outputs)[0] for outputs in alone] == expected
    assert result["platform"] == PLATFORM
    (table,) = result["operators"]
    assert {row["implementation"] for row in table} == {"reference.torch"}
    assert {row["wheel"] for row in table} == {"vllm-fl-reference"}
    counted = calls(result)
    for op in ("silu_and_mul", "rms_norm", "rotary_embedding"):
        assert counted[op] > 1000, op
    assert counted["gelu_and_mul"] == counted["gemma_rms_norm"] == 0


def test_chunked_prefill(vllm, tiny_model, prompts, expected):
    result = vllm(tiny_model, prompts, max_num_batched_tokens=64, enable_prefix_caching=False)
    assert tokens(result["outputs"][0]) == expected


def test_prefix_caching(vllm, transformers, tiny_model, prompts):
    base, other = prompts[-1], prompts[-2]
    shared = (0, 1, BLOCK, BLOCK + 1, 5 * BLOCK)
    variants = [base[:n] + other[n : n + 40] for n in shared]
    greedy = transformers(tiny_model, [base, *variants], 32)["tokens"]
    result = vllm(
        tiny_model, [base], variants, [base, *variants],
        new_tokens=32, enable_prefix_caching=True, block_size=BLOCK,
    )  # fmt: skip
    first, second, third = result["outputs"]
    assert tokens(first) == greedy[:1]
    assert tokens(second) == greedy[1:]
    assert tokens(third) == greedy
    assert first[0]["cached"] == 0
    assert [output["cached"] for output in second] == [0, 0, BLOCK, BLOCK, 5 * BLOCK]
    assert third[0]["cached"] == (len(base) - 1) // BLOCK * BLOCK


def test_in_this_process(vllm, tiny_model, prompts, expected):
    result = vllm(tiny_model, prompts, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    assert tokens(result["outputs"][0]) == expected


def test_tensor_parallel_over_two_processes(vllm, tiny_model, prompts, expected):
    result = vllm(tiny_model, prompts, tensor_parallel_size=2)
    assert tokens(result["outputs"][0]) == expected
    assert len(result["operators"]) == 2
    assert calls(result, 0) == calls(result, 1)
    assert calls(result)["rms_norm"] > 0


def test_bfloat16_log_probabilities(vllm, check_bfloat16, tiny_model, prompts):
    longer = [prompt for prompt in prompts if len(prompt) >= 16]
    result = vllm(
        tiny_model, longer, new_tokens=1, sampling={"prompt_logprobs": 0}, dtype="bfloat16"
    )
    check_bfloat16(tiny_model, longer, result)


def test_an_attention_backend_that_cannot_run_here_is_refused(vllm, tiny_model, prompts):
    with pytest.raises(Exception, match="FLASH_ATTN was asked for") as caught:
        vllm(tiny_model, prompts[:1], attention_backend="FLASH_ATTN")
    assert "No attention backend of vllm-fl can serve this model on the cpu" in str(caught.value)
    result = vllm(tiny_model, prompts[:1], attention_backend="CUSTOM", new_tokens=2)
    assert "vllm_fl_reference.attention.backend.ReferenceAttentionBackend" in result["log"]
