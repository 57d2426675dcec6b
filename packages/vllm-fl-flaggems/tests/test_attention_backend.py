"""The attention backend's classes, driven with vLLM's own metadata but without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import paged
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_fl.dispatch import policy_context
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl_flaggems.attention import planning
from vllm_fl_flaggems.attention.backend import (
    AttentionFLBackend,
    AttentionFLImpl,
    AttentionFLMetadata,
    AttentionFLMetadataBuilder,
)
from vllm_fl_flaggems.attention.planning import ANY_LENGTH, Mathematics

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 16
SUPPORTED: dict[str, Any] = {
    "head_size": 80,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 32,
    "use_mla": False,
    "has_sink": True,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": None,
    "attn_type": AttentionType.DECODER,
    "has_sliding_window": True,
    "use_non_causal": True,
}


def make_impl(**options: Any) -> AttentionFLImpl:
    arguments = {"num_heads": HEADS, "head_size": SIZE, "scale": 0.3, "num_kv_heads": KV_HEADS}
    policy = SelectionPolicy.from_dict(per_op_order={"reshape_and_cache_flash": ["flagos"]})
    with set_current_vllm_config(VllmConfig()), policy_context(policy):
        return AttentionFLImpl(**(arguments | options))


def make_builder(mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE) -> Any:
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32
    )
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=512),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
    )
    builder: Any = AttentionFLMetadataBuilder
    return builder(spec, ["layer"], config, torch.device("cpu"))


def make_common(counts: list[int], device: str = "meta", **options: Any) -> CommonAttentionMetadata:
    """Describe a step; on the device "meta" nothing can be read from its tensors."""
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    requests, tokens = len(counts), sum(counts)
    given: dict[str, Any] = {
        "query_start_loc": torch.zeros(requests + 5, dtype=torch.int32, device=device),
        "query_start_loc_cpu": starts,
        "seq_lens": torch.zeros(requests + 4, dtype=torch.int32, device=device),
        "num_reqs": requests,
        "num_actual_tokens": tokens,
        "max_query_len": max(counts),
        "max_seq_len": 100,
        "block_table_tensor": torch.zeros(requests + 4, 8, dtype=torch.int32, device=device),
        "slot_mapping": torch.zeros(tokens, dtype=torch.int64, device=device),
    }
    return CommonAttentionMetadata(**(given | options))


@pytest.mark.parametrize(
    ("counts", "bounds"),
    [([1, 1, 1], (1, 1)), ([1, 30, 0], (1, 30)), ([12, 30], (12, 30)), ([4, 4, 0], (4, 4))],
)
def test_the_builder_reads_nothing_from_the_device(
    counts: list[int], bounds: tuple[int, int]
) -> None:
    common = make_common(counts)
    metadata = make_builder().build(0, common)
    step = metadata.step
    assert step.queries == bounds
    assert step.tokens == sum(counts)
    assert (step.longest, metadata.block_size) == (512, BLOCK)
    for view, buffer in (
        (step.query_start, common.query_start_loc),
        (step.lengths, common.seq_lens),
        (step.table, common.block_table_tensor),
    ):
        assert view._base is buffer  # vLLM's own persistent buffer, which a graph reads again


def test_causality_by_request_stays_on_the_device() -> None:
    flags = torch.ones(8, dtype=torch.bool, device="meta")
    assert make_builder().build(0, make_common([1, 5], causal=flags)).step.causal._base is flags


@pytest.mark.parametrize(
    ("mode", "counts", "bounds"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, [1, 1, 1], (1, 1)),
        (CUDAGraphMode.FULL_DECODE_ONLY, [3, 3], (1, 3)),
        (CUDAGraphMode.FULL, [1, 1, 1], ANY_LENGTH),
        (CUDAGraphMode.FULL, [20, 20], ANY_LENGTH),
    ],
)
def test_what_a_captured_graph_must_be_right_for(
    mode: CUDAGraphMode, counts: list[int], bounds: tuple[int, int]
) -> None:
    metadata = make_builder(mode).build_for_cudagraph_capture(make_common(counts))
    assert metadata.step.queries == bounds


def test_any_step_may_be_captured() -> None:
    support = AttentionFLMetadataBuilder.get_cudagraph_support
    assert support(None, None) is AttentionCGSupport.ALWAYS  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["mm_req_doc_ranges", "rswa_prefix_lens"])
def test_steps_that_are_refused(option: str) -> None:
    with pytest.raises(NotImplementedError, match="does not support"):
        make_builder().build(0, make_common([1], **{option: {0: [(0, 1)]}}))


def test_supported_configurations_have_no_objection() -> None:
    assert AttentionFLBackend.validate_configuration(**SUPPORTED) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"head_size": 512}, "head_size not supported"),
        ({"block_size": 24}, "block_size not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 is not the model's dtype"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type"),
    ],
)
def test_refused_configurations_have_a_reason(changed: dict[str, Any], reason: str) -> None:
    assert any(
        reason in text for text in AttentionFLBackend.validate_configuration(**SUPPORTED | changed)
    )


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"attn_type": "encoder"}, NotImplementedError, "attention type 'encoder'"),
        ({"kv_cache_dtype": "fp8"}, NotImplementedError, "kv_cache_dtype 'fp8'"),
        ({"head_size": 320}, NotImplementedError, "heads of 320 channels"),
        ({"use_irope": True}, NotImplementedError, "use_irope=True"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks must have 4 entries, got 3"),
        ({"alibi_slopes": [1.0]}, ValueError, "alibi_slopes must have 4 entries, got 1"),
        ({"num_kv_heads": 3}, ValueError, "not a multiple of 3 kv heads"),
        ({"scale": 0.0}, ValueError, "scale must be positive"),
    ],
)
def test_layers_that_are_refused(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make_impl(**options)


def step_of(case: paged.Paged) -> AttentionFLMetadata:
    return AttentionFLMetadata(step=case.step, block_size=BLOCK)


def cache_of(case: paged.Paged) -> Tensor:
    """Return the cache as vLLM hands it out, ``[blocks, kv_heads, block_size, 2 * size]``."""
    shape = (*case.keys.shape[:3], 2 * SIZE)
    return case.keys.as_strided(shape, case.keys.stride()).transpose(1, 2)


def test_the_write_is_the_bound_operator_and_forward_reads_it() -> None:
    case = paged.make([(20, 1), (3, 1)])
    impl, cache, layer = make_impl(), cache_of(case), Mathematics(0.3)
    assert impl._write.impl is not None
    assert impl._write.impl.impl_id == "default.flagos"
    ends = [(int(case.step.table[r, p // BLOCK]), p % BLOCK) for r, p in ((0, 20), (1, 3))]
    slots = torch.tensor([block * BLOCK + place for block, place in ends] + [-1])
    new = [torch.stack([part[i][-1] for part in case.parts]) for i in (0, 1)]
    for block, place in ends:
        cache[block, :, place] = torch.nan
    padded = [torch.cat((x, x[:1] + 50)) for x in new]
    nothing: Any = None
    impl.do_kv_cache_update(nothing, *padded, cache, slots)
    out = torch.full_like(case.query, 7.0)
    assert impl.forward(nothing, case.query, None, None, cache, step_of(case), out) is out
    torch.testing.assert_close(out.double(), paged.oracle(case, layer), rtol=1e-5, atol=1e-5)


def test_a_profiling_run_and_what_forward_refuses() -> None:
    case = paged.make([(20, 1)])
    impl, cache, out = make_impl(), cache_of(case), torch.ones_like(case.query)
    nothing: Any = None
    call = (nothing, case.query, None, None, cache)
    assert not impl.forward(*call, None, out).any()
    with pytest.raises(NotImplementedError, match="quantised output"):
        impl.forward(*call, step_of(case), out, output_scale=out)
    other = AttentionFLMetadata(step=case.step, block_size=32)
    with pytest.raises(ValueError, match="blocks of 16 tokens, its metadata was built for 32"):
        impl.forward(*call, other, out)


@pytest.mark.parametrize("phases", [("decode",), ("decode", "prefill")])
def test_the_warm_up_launches_every_variant_and_leaves_no_trace(
    phases: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: dict[str, list[Any]] = {"decode": [], "prefill": []}
    for name, tiles in launched.items():
        kernel = getattr(planning, name)

        def noting(*args: Any, tiles: list[Any] = tiles, kernel: Any = kernel, **kw: Any) -> None:
            tiles.append(kw["tile"])
            kernel(*args, **kw)

        monkeypatch.setattr(planning, name, noting)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=2048),
        scheduler_config=SimpleNamespace(max_num_seqs=200, max_num_batched_tokens=8192),
    )
    cache = cache_of(paged.make([(20, 1)]))
    before = cache.clone()
    make_impl().warm_up(cache, config, phases)
    torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)
    wanted = [(32, 16), (64, 8), (64, 4), (64, 2), (64, 1)]
    assert [(tile.block_n, tile.splits) for tile in launched["decode"]] == wanted
    prefill = [planning.prefill_tile(SIZE, 4, 8192)] if "prefill" in phases else []
    assert launched["prefill"] == prefill


def test_it_can_decode_where_flashattention_does_the_rest():
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    from vllm_fl.integration.phased_attention import by_phase

    with set_current_vllm_config(VllmConfig()):
        backend = by_phase(AttentionFLBackend, FlashAttentionBackend)
    wanted = AttentionFLBackend.get_kv_cache_shape(7, BLOCK, KV_HEADS, SIZE)
    assert backend.get_kv_cache_shape(7, BLOCK, KV_HEADS, SIZE) == wanted
    assert backend.forward_includes_kv_cache_update is False
    assert [size.base for size in backend.get_supported_kernel_block_sizes()] == [16]
