"""The vLLM classes, driven with vLLM's own metadata but without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_fl_reference.attention import metadata as module
from vllm_fl_reference.attention.backend import ReferenceAttentionBackend, ReferenceAttentionImpl
from vllm_fl_reference.attention.metadata import (
    ReferenceAttentionMetadata,
    ReferenceAttentionMetadataBuilder,
)

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 16
SUPPORTED: dict[str, Any] = {
    "head_size": 46,
    "dtype": torch.float32,
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


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def make_impl(**options: Any) -> ReferenceAttentionImpl:
    arguments = {"num_heads": HEADS, "head_size": SIZE, "scale": 0.3, "num_kv_heads": KV_HEADS}
    return ReferenceAttentionImpl(**(arguments | options))


def make_metadata(
    query_lens: list[int], seq_lens: list[int], padding: int = 0, **options: Any
) -> ReferenceAttentionMetadata:
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    columns = -(-max(seq_lens) // BLOCK)
    table = 1 + torch.arange(len(seq_lens) * columns, dtype=torch.int32).view(-1, columns)
    slots = [
        int(table[r, p // BLOCK]) * BLOCK + p % BLOCK
        for r, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True))
        for p in range(total - new, total)
    ]
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(seq_lens),
        num_actual_tokens=len(slots),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots + [-1] * padding),
        **options,
    )
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32
    )
    builder: Any = ReferenceAttentionMetadataBuilder
    return builder(spec, ["layer"], None, torch.device("cpu")).build(0, common)


def make_cache(blocks: int = 12) -> Tensor:
    shape = ReferenceAttentionBackend.get_kv_cache_shape(blocks, BLOCK, KV_HEADS, SIZE)
    order = ReferenceAttentionBackend.get_kv_cache_stride_order()
    memory = torch.full([shape[i] for i in order], torch.nan)
    return memory.permute(*(order.index(i) for i in range(len(shape))))


def forward(
    impl: ReferenceAttentionImpl,
    metadata: ReferenceAttentionMetadata | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    cache: Tensor,
    **options: Any,
) -> Tensor:
    output = torch.full_like(qkv[0], 7.0)
    layer: Any = None
    assert impl.forward(layer, *qkv, cache, metadata, output, **options) is output
    return output


def make_qkv(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(tokens, HEADS, SIZE),
        normal(tokens, KV_HEADS, SIZE, seed=1),
        normal(tokens, KV_HEADS, SIZE, seed=2),
    )


def attend(qkv: tuple[Tensor, Tensor, Tensor], visible: Tensor) -> Tensor:
    """Plain attention of one request; ``visible`` is ``[queries, keys]``."""
    query, key, value = (t.double() for t in qkv)
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (key, value))
    logits = 0.3 * torch.einsum("qhd,khd->hqk", query, key)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value).float()


def close(out: Tensor, expected: Tensor) -> bool:
    return torch.allclose(out, expected, rtol=0, atol=1e-5)


def test_the_cache_is_token_major_and_blocks_come_first() -> None:
    cache = make_cache()
    assert cache.shape == (12, KV_HEADS, BLOCK, 2 * SIZE)
    assert cache.transpose(1, 2).is_contiguous()
    layered = ReferenceAttentionBackend.get_kv_cache_stride_order(True)
    assert sorted(layered) == [0, 1, 2, 3, 4]
    # Block, layer, token, head, content.
    assert layered == (1, 0, 3, 2, 4)


def test_a_prefill_and_then_a_decode() -> None:
    tokens = 21
    qkv, cache, impl = make_qkv(tokens), make_cache(), make_impl()
    expected = attend(qkv, torch.ones(tokens, tokens).tril().bool())
    first = tuple(t[:20] for t in qkv)
    assert close(forward(impl, make_metadata([20], [20]), first, cache), expected[:20])
    last = tuple(t[20:] for t in qkv)
    assert close(forward(impl, make_metadata([1], [21]), last, cache), expected[20:])


def test_padding_is_neither_stored_nor_computed() -> None:
    qkv, cache = make_qkv(8), make_cache()
    out = forward(make_impl(), make_metadata([5], [5], padding=3), qkv, cache)
    assert (out[5:] == 7.0).all()
    assert cache[0].isnan().all()
    assert cache[1, :, 5:].isnan().all()


def test_layers_share_the_plan_and_windows_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int | None] = []
    plan = module.plan_attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["window"])
        return plan(*args, **kwargs)

    monkeypatch.setattr(module, "plan_attention", counted)
    metadata, qkv = make_metadata([6], [6]), make_qkv(6)
    for window in (None, 2, None, 2, None):
        distance = torch.arange(6)[:, None] - torch.arange(6)
        visible = (distance >= 0) & (distance < (6 if window is None else window))
        out = forward(make_impl(sliding_window=window), metadata, qkv, make_cache())
        assert close(out, attend(qkv, visible))
    assert calls == [None, 2]


def test_a_layer_that_shares_a_cache_does_not_write() -> None:
    qkv, cache, metadata = make_qkv(6), make_cache(), make_metadata([6], [6])
    expected = forward(make_impl(), metadata, qkv, cache)
    before = cache.clone()
    reader = make_impl(kv_sharing_target_layer_name="layer")
    other = (qkv[0], torch.zeros_like(qkv[1]), torch.zeros_like(qkv[2]))
    assert torch.equal(forward(reader, metadata, other, cache), expected)
    assert torch.equal(cache.nan_to_num(), before.nan_to_num())
    missing: Any = (qkv[0], None, None)
    assert torch.equal(forward(make_impl(), metadata, missing, cache), expected)


@pytest.mark.parametrize("window", [None, 3])
def test_encoder_only_attention_is_bidirectional_and_needs_no_cache(window: int | None) -> None:
    qkv = make_qkv(9)
    # vLLM wraps the builder for such layers and sets causal to False.
    metadata = make_metadata([5, 4], [5, 4], causal=False)
    impl = make_impl(attn_type=AttentionType.ENCODER_ONLY, sliding_window=window)
    out = forward(impl, metadata, qkv, torch.empty(0))
    for rows in (slice(0, 5), slice(5, 9)):
        part = tuple(t[rows] for t in qkv)
        position = torch.arange(len(part[0]))
        distance = (position[:, None] - position).abs()
        assert close(out[rows], attend(part, distance < (9 if window is None else window)))


@pytest.mark.parametrize("causal", [False, torch.tensor([False, True])])
def test_causality_comes_from_the_metadata(causal: bool | Tensor) -> None:
    qkv = make_qkv(9)
    out = forward(make_impl(), make_metadata([5, 4], [5, 4], causal=causal), qkv, make_cache())
    first, second = tuple(t[:5] for t in qkv), tuple(t[5:] for t in qkv)
    assert close(out[:5], attend(first, torch.ones(5, 5).bool()))
    everything, past = torch.ones(4, 4).bool(), torch.ones(4, 4).tril().bool()
    assert close(out[5:], attend(second, everything if causal is False else past))


def test_options_reach_the_mathematics() -> None:
    qkv, metadata = make_qkv(6), make_metadata([6], [6])
    plain = forward(make_impl(), metadata, qkv, make_cache())
    assert torch.equal(forward(make_impl(logits_soft_cap=0.0), metadata, qkv, make_cache()), plain)
    for options in (
        {"logits_soft_cap": 0.5},
        {"sinks": torch.ones(HEADS)},
        {"alibi_slopes": [0.1, 0.2, 0.3, 0.4]},
    ):
        out = forward(make_impl(**options), metadata, qkv, make_cache())
        assert not torch.allclose(out, plain, atol=1e-3), options


def test_a_profiling_run_gives_zeros() -> None:
    assert (forward(make_impl(), None, make_qkv(3), torch.empty(0)) == 0).all()


def test_layers_of_one_group_may_differ_in_head_size() -> None:
    metadata = make_metadata([6], [6])
    for size in (4, 512):
        query, kv = normal(6, HEADS, size), normal(6, KV_HEADS, size, seed=1)
        cache = torch.full((2, KV_HEADS, BLOCK, 2 * size), torch.nan)
        out = forward(make_impl(head_size=size), metadata, (query, kv, kv), cache)
        assert close(out, attend((query, kv, kv), torch.ones(6, 6).tril().bool()))


def test_everything_supported_is_accepted() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for head_size in (8, 46, 80, 256, 512):
            changes = {"dtype": dtype, "head_size": head_size}
            assert ReferenceAttentionBackend.validate_configuration(**SUPPORTED | changes) == []
    encoder = SUPPORTED | {"attn_type": AttentionType.ENCODER_ONLY}
    assert ReferenceAttentionBackend.validate_configuration(**encoder) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"dtype": torch.float64}, "dtype"),
        ({"block_size": 24}, "block_size"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, "encoder_decoder|ENCODER_DECODER"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_pcp": True}, "PCP"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    reasons = ReferenceAttentionBackend.validate_configuration(**SUPPORTED | changes)
    assert len(reasons) == 1
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(reasons[0])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"chunk_lookback": 1}, "does not support chunk_lookback=1"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, "attention type"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"),
    ],
    ids=str,
)
def test_layers_refuse_what_they_would_have_to_ignore(options: dict[str, Any], match: str) -> None:
    with pytest.raises(NotImplementedError, match=match):
        make_impl(**options)


@pytest.mark.parametrize("options", [{"sinks": torch.ones(3)}, {"alibi_slopes": [0.5] * 5}])
def test_one_sink_and_slope_per_head(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must have 4 entries, got [35]"):
        make_impl(**options)


def test_steps_refuse_what_they_would_have_to_ignore() -> None:
    with pytest.raises(NotImplementedError, match="multimodal"):
        make_metadata([2], [2], mm_req_doc_ranges={0: [(0, 1)]})
    with pytest.raises(NotImplementedError, match="R-SWA"):
        make_metadata([2], [2], rswa_prefix_lens=torch.ones(1))


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_quantised_output_is_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match="quantised output"):
        forward(make_impl(), make_metadata([2], [2]), make_qkv(2), make_cache(), **{name: 1.0})


def test_a_cache_with_other_blocks_is_refused() -> None:
    cache = torch.zeros(4, KV_HEADS, 8, 2 * SIZE)
    with pytest.raises(ValueError, match="blocks of 8 tokens, its metadata was built for 16"):
        forward(make_impl(), make_metadata([2], [2]), make_qkv(2), cache)


def test_an_encoder_without_keys_is_refused() -> None:
    impl = make_impl(attn_type=AttentionType.ENCODER_ONLY)
    missing: Any = (make_qkv(2)[0], None, None)
    with pytest.raises(ValueError, match="needs a key and a value"):
        forward(impl, make_metadata([2], [2]), missing, torch.empty(0))


def test_the_name_is_the_one_vllm_leaves_to_others() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert AttentionBackendEnum[ReferenceAttentionBackend.get_name()]
    assert ReferenceAttentionBackend.get_impl_cls() is ReferenceAttentionImpl
    assert ReferenceAttentionBackend.get_builder_cls() is ReferenceAttentionMetadataBuilder
    assert not ReferenceAttentionBackend.use_cascade_attention()
