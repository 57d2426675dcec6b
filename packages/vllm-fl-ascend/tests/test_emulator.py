"""The emulated torch_npu refuses what the vendor's schemas and documentation do not allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch_npu
from torch_npu.library import SCHEMAS, Refused

from vllm_fl_ascend.attention.attention_mask import compressed

SCHEMA_FILES = sorted(Path(torch_npu.__file__).parent.glob("schemas/*.json"))
HALF = torch.bfloat16


def test_the_schemas_are_those_of_both_versions_and_say_where_they_are_from():
    assert [path.stem for path in SCHEMA_FILES] == ["2.11.0", "2.13.0"]
    contents = [json.loads(path.read_text()) for path in SCHEMA_FILES]
    for path, content in zip(SCHEMA_FILES, contents, strict=True):
        assert f"torch_npu-{path.stem}-" in content["source"]
    old, new = (content["schemas"] for content in contents)
    assert {name for name in new if old[name] != new[name]} == {"npu_moe_gating_top_k"}
    assert set(SCHEMAS) == set(old) == set(new)


def test_every_operator_is_emulated_for_tensors_and_for_tracers():
    for name in SCHEMAS:
        for key in ("CPU", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", key), (name, key)
        assert getattr(torch_npu, name) is getattr(torch.ops.npu, name)


def x(*shape, dtype=HALF):
    return torch.randn(*shape).to(dtype)


def fia(**changes):
    call = {
        "query": x(5, 4, 64), "key": x(3, 128, 128), "value": x(3, 128, 128),
        "atten_mask": compressed(torch.device("cpu")), "sparse_mode": 3, "num_heads": 4,
        "num_key_value_heads": 2, "input_layout": "TND", "block_size": 128, "scale": 0.1,
        "actual_seq_lengths": [2, 5], "actual_seq_lengths_kv": [4, 130],
        "block_table": torch.tensor([[2, 0], [1, 0]], dtype=torch.int32),
    }  # fmt: skip
    return torch_npu.npu_fused_infer_attention_score(**{**call, **changes})


def test_a_right_call_of_attention():
    out, lse = fia()
    assert out.shape == (5, 4, 64)
    assert lse.tolist() == [0.0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"query": x(5, 4, 80), "key": x(3, 128, 160), "value": x(3, 128, 160)}, "80 channels"),
        ({"query": x(5, 4, 64, dtype=torch.float32)}, "float32"),
        ({"num_heads": 2, "num_key_value_heads": 4}, "2 heads, 4 kv heads"),
        ({"num_heads": 2}, "num_heads=2"),
        ({"num_key_value_heads": 4}, "the cache has 128 channels, not 256"),
        ({"actual_seq_lengths": [2, 3]}, "actual_seq_lengths"),
        ({"actual_seq_lengths": None}, "actual_seq_lengths is missing"),
        ({"actual_seq_lengths_kv": None}, "actual_seq_lengths_kv is missing"),
        ({"actual_seq_lengths_kv": [4, 300]}, "300 keys in 2 blocks"),
        ({"actual_seq_lengths_kv": [1, 130]}, "2 queries and 1 keys"),
        ({"block_size": 64}, "block_size=64"),
        ({"block_table": torch.tensor([[2, 0], [3, 0]], dtype=torch.int32)}, "block number"),
        ({"block_table": torch.tensor([[2, 0], [1, 0]])}, "block_table"),
        ({"atten_mask": None}, "needs the mask 2048 x 2048"),
        ({"atten_mask": compressed(torch.device("cpu"))[:1024]}, "2048 x 2048"),
        ({"atten_mask": 1 - compressed(torch.device("cpu"))}, "1 above the diagonal"),
        ({"atten_mask": compressed(torch.device("cpu")).float()}, "mask torch.float32"),
        ({"sparse_mode": 1}, "sparse_mode=1"),
        ({"softmax_lse_flag": True}, "softmax_lse_flag"),
        ({"key": x(6, 64, 128), "value": x(6, 64, 128), "block_size": 64,
          "block_table": torch.zeros(2, 4, dtype=torch.int32)}, "blocks of 64 tokens"),
        ({"input_layout": "BNSD"}, "input_layout='BNSD'"),
    ],
)  # fmt: skip
def test_attention_refuses(change, reason):
    with pytest.raises(Refused, match=reason):
        fia(**change)


def test_decoding_takes_sixteen_queries_and_no_more():
    plain = {"atten_mask": None, "sparse_mode": 0, "actual_seq_lengths_kv": [20, 20]}
    fia(query=x(17, 4, 64), actual_seq_lengths=[1, 17], **plain)
    with pytest.raises(Refused, match="decoding with 17 queries"):
        fia(query=x(18, 4, 64), actual_seq_lengths=[1, 18], **plain)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch_npu.npu_rms_norm(x(2, 8), x(8), eps=1e-5),
        lambda: torch_npu.npu_rms_norm(x(2, 8)),
        lambda: torch_npu.npu_rms_norm(x(2, 8), 1e-5, x(8)),
        lambda: torch_npu.npu_fused_infer_attention_score(x(2, 8), x(2, 8), x(2, 8), None),
        lambda: torch_npu.npu_scatter_pa_kv_cache(x(1), x(1), x(1), x(1), slot_indices=x(1)),
        lambda: torch_npu.npu_gelu(x(2, 8), "tanh"),
        lambda: torch_npu.npu_moe_gating_top_k(x(2, 8), k=2, bias_opt=x(8)),
        lambda: torch_npu.npu_grouped_matmul(x(2, 8), [x(1, 8, 8)]),
        lambda: torch_npu.npu_mrope(x(2), x(2, 8), x(2, 8), x(2, 8), 8, [0, 0, 0]),
    ],
)
def test_the_schemas_refuse_wrong_keywords_orders_and_types(call):
    with pytest.raises((RuntimeError, TypeError), match="npu::"):
        call()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: torch_npu.npu_rms_norm(x(8), x(8)), "1 dimensions"),
        (lambda: torch_npu.npu_rms_norm(x(2, 8), x(8, dtype=torch.float32)), "dtypes differ"),
        (lambda: torch_npu.npu_gemma_rms_norm(x(8, 2).t(), x(8)), "not contiguous"),
        (lambda: torch_npu.npu_moe_gating_top_k_softmax(x(1, 2000), k=1025), "k=1025"),
        (lambda: torch_npu.npu_moe_gating_top_k(x(2, 8), 2, renorm=1), "renorm=1"),
        (lambda: torch_npu.npu_moe_gating_top_k(x(2, 8), 2, group_count=4), "group_count"),
        (lambda: torch_npu.npu_moe_init_routing_v2(
            x(2, 8), torch.zeros(2, 2, dtype=torch.int64), expert_num=2), "expert_idx"),
        (lambda: torch_npu.npu_grouped_matmul(
            [x(2, 8)], [x(1, 8, 8)], group_list=torch.tensor([2]), split_item=2, group_type=0,
            group_list_type=1), "a single size"),
        (lambda: torch_npu.npu_moe_token_unpermute(
            x(2, 8), torch.tensor([0, -1], dtype=torch.int32)), "an index"),
        (lambda: torch_npu.npu_scatter_pa_kv_cache(
            x(1, 2, 8), x(1, 2, 8), x(2, 16, 2, 8), x(2, 16, 2, 8),
            torch.tensor([32]), cache_mode="Norm"), "outside the cache"),
        (lambda: torch_npu.npu_scatter_pa_kv_cache(
            x(1, 2, 8), x(1, 2, 8), x(2, 16, 2, 8), x(2, 16, 2, 8),
            torch.tensor([1])), "cache_mode='PA_NZ'"),
        (lambda: torch_npu.npu_mrope(
            torch.zeros(2, dtype=torch.int64), x(2, 64), x(2, 64), x(4, 16), 64,
            mrope_section=[0, 0, 0]), "16 is no multiple of 32"),
        (lambda: torch_npu.npu_mrope(
            torch.zeros(2, dtype=torch.int64), x(2, 64), x(2, 64), x(4, 32), 64,
            mrope_section=[0, 0, 0], rotary_mode="interleaved"), "interleaved"),
    ],
)  # fmt: skip
def test_the_documentation_s_limits(call, reason):
    with pytest.raises(Refused, match=reason):
        call()


def test_what_is_undefined_is_nan():
    rows, places, counts, scale = torch_npu.npu_moe_init_routing_v2(
        x(2, 8),
        torch.tensor([[2, 0], [1, 2]], dtype=torch.int32),
        active_num=4,
        expert_num=3,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, 2],
    )
    assert rows[2:].isnan().all()
    assert not rows[:2].isnan().any()
    assert places.tolist() == [-1, 0, 1, -1]
    assert counts.tolist() == [1, 1]
    assert scale.isnan().all()
    cache = torch.zeros(1, 16, 1, 8)
    key = torch.ones(2, 1, 8)
    torch_npu.npu_scatter_pa_kv_cache(
        key, key, cache, cache.clone(), torch.tensor([3, 3]), cache_mode="Norm"
    )
    assert cache[0, 3].isnan().all()
