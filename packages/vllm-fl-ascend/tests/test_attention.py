"""The attention layer on emulated operators, against the definition; and with faults put in."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch_npu.library import Refused
from vllm.v1.attention.backend import AttentionType

from vllm_fl_ascend.attention import backend, metadata
from vllm_fl_ascend.attention.backend import AscendAttentionBackend, AscendAttentionImpl
from vllm_fl_ascend.attention.metadata import AttentionState, make_metadata

BLOCK, HEADS, KV_HEADS, SIZE, SCALE = 128, 4, 2, 64, 0.2
# state -> the requests of a step as (new tokens, tokens in the cache), and queries of a decode
STEPS = {
    AttentionState.PREFILL_NO_CACHE: ([(5, 0), (1, 0), (140, 0)], 1),
    AttentionState.PREFILL_CACHE_HIT: ([(6, 3), (2, 128), (130, 129)], 1),
    AttentionState.DECODE_ONLY: ([(1, 3), (1, 127), (1, 128), (1, 300)], 1),
    AttentionState.CHUNKED_PREFILL: ([(1, 130), (7, 0), (1, 2), (40, 200)], 1),
    AttentionState.SPEC_DECODING: ([(4, 130), (3, 9), (4, 256)], 4),
}


class Layer:
    """A layer with a cache of shuffled blocks, in which the context of each request is stored."""

    def __init__(self, requests, window=None, decode_queries=1, dtype=torch.bfloat16):
        random = torch.Generator().manual_seed(7)
        self.requests, self.window = requests, window
        self.lengths = [new + context for new, context in requests]

        def normal(length, heads):
            return torch.randn(length, heads, SIZE, generator=random).to(dtype)

        self.queries = [normal(new, HEADS) for new, _ in requests]
        self.keys = [normal(length, KV_HEADS) for length in self.lengths]
        self.values = [normal(length, KV_HEADS) for length in self.lengths]
        columns = [-(-length // BLOCK) for length in self.lengths]
        numbers = (torch.randperm(sum(columns), generator=random) + 1).tolist()
        self.table = torch.zeros((len(requests), max(columns)), dtype=torch.int32)
        # Block 0 and unwritten slots hold NaN.
        self.cache = torch.full((2, sum(columns) + 1, BLOCK, KV_HEADS, SIZE), torch.nan).to(dtype)
        slots = []
        for row, (count, (_, context)) in enumerate(zip(columns, requests, strict=True)):
            mine = [numbers.pop() for _ in range(count)]
            self.table[row, :count] = torch.tensor(mine)
            places = [mine[p // BLOCK] * BLOCK + p % BLOCK for p in range(self.lengths[row])]
            stored = torch.tensor(places[:context], dtype=torch.int64)
            self.cache[0].view(-1, KV_HEADS, SIZE)[stored] = self.keys[row][:context]
            self.cache[1].view(-1, KV_HEADS, SIZE)[stored] = self.values[row][:context]
            slots += places[context:]
        self.step = make_metadata(
            [0, *accumulate(new for new, _ in requests)],
            self.lengths,
            self.table,
            torch.tensor([*slots, -1]),
            BLOCK,
            decode_queries,
        )

    def run(self, impl=None):
        impl = impl or AscendAttentionImpl(HEADS, SIZE, SCALE, KV_HEADS, sliding_window=self.window)
        new = [n for n, _ in self.requests]
        query, key, value = self._packed(
            [x[-n:] for x, n in zip(parts, new, strict=True)]
            for parts in (self.queries, self.keys, self.values)
        )
        output = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
        impl.forward(None, query, key, value, self.cache, self.step, output)
        assert output[sum(new) :].isnan().all(), "a padding row was written"
        return output[: sum(new)]

    @staticmethod
    def _packed(tails):
        """Views of one packed projection with a row of padding, as a model makes them."""
        parts = [torch.cat(tail) for tail in tails]
        rows = torch.cat([part.flatten(1) for part in parts], dim=1)
        rows = torch.cat((rows, torch.ones_like(rows[:1])))
        widths = [part.shape[1] * SIZE for part in parts]
        return [x.view(len(rows), -1, SIZE) for x in rows.split(widths, dim=1)]

    def expected(self):
        """One query at a time, in fp64."""
        rows = []
        for queries, keys, values, (_, context) in zip(
            self.queries, self.keys, self.values, self.requests, strict=True
        ):
            group = HEADS // KV_HEADS
            k = keys.double().repeat_interleave(group, 1)
            v = values.double().repeat_interleave(group, 1)
            for index, query in enumerate(queries.double()):
                last = context + index + 1
                first = 0 if self.window is None else max(0, last - self.window)
                scores = torch.einsum("hd,khd->hk", query, k[first:last]) * SCALE
                rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[first:last]))
        return torch.stack(rows)

    def check(self, impl=None):
        torch.testing.assert_close(self.run(impl).double(), self.expected(), rtol=2e-2, atol=2e-2)


def cases():
    for state, (requests, decode_queries) in STEPS.items():
        for window in (None, 1, 20, 129):
            yield pytest.param(state, requests, decode_queries, window, id=f"{state.name}-{window}")


@pytest.mark.parametrize(("state", "requests", "decode_queries", "window"), list(cases()))
def test_every_state(state, requests, decode_queries, window):
    layer = Layer(requests, window, decode_queries)
    assert layer.step.state is state
    layer.check()


def test_float16():
    Layer(*STEPS[AttentionState.CHUNKED_PREFILL][:1], dtype=torch.float16).check()


def test_the_cache_holds_the_new_keys_and_values():
    layer = Layer([(3, 127), (2, 0)])
    layer.run()
    for row, length in enumerate(layer.lengths):
        table = layer.table[row].long()
        for kept, cached in ((layer.keys, layer.cache[0]), (layer.values, layer.cache[1])):
            assert torch.equal(cached[table].flatten(0, 1)[:length], kept[row])
    assert layer.cache[:, 0].isnan().all(), "the null block was written"


def test_a_layer_that_shares_a_cache_reads_it_and_writes_nothing():
    layer = Layer([(3, 127), (4, 0)])
    layer.check()
    before = layer.cache.clone()
    shared = AscendAttentionImpl(
        HEADS, SIZE, SCALE, KV_HEADS, kv_sharing_target_layer_name="layers.0"
    )
    for keys in (layer.keys, layer.values):
        keys[:] = [x + 1 for x in keys]  # what the layer itself computes is not what it reads
    output = layer.run(shared)
    layer.keys[:], layer.values[:] = ([x - 1 for x in y] for y in (layer.keys, layer.values))
    torch.testing.assert_close(output.double(), layer.expected(), rtol=2e-2, atol=3e-2)
    assert torch.equal(layer.cache.nan_to_num(9), before.nan_to_num(9))


def test_a_profiling_run_and_a_step_without_tokens_give_zeros():
    impl = AscendAttentionImpl(HEADS, SIZE, SCALE, KV_HEADS)
    output = torch.full((3, HEADS, SIZE), torch.nan)
    assert impl.forward(None, output, None, None, output, None, output) is output
    assert not output.any()


# Faults -----------------------------------------------------------------------------------------


def swap_head_counts(monkeypatch):
    attend = AscendAttentionImpl._attend

    def swapped(self, *args, **how):
        self.num_heads, self.num_kv_heads = self.num_kv_heads, self.num_heads
        try:
            return attend(self, *args, **how)
        finally:
            self.num_heads, self.num_kv_heads = self.num_kv_heads, self.num_heads

    monkeypatch.setattr(AscendAttentionImpl, "_attend", swapped)


def as_many_kv_heads_as_heads(monkeypatch):
    changed(monkeypatch, lambda call: {**call, "num_key_value_heads": 0})


def changed(monkeypatch, change):
    """Change the arguments of the vendor's operator."""
    import torch_npu

    real = torch_npu.npu_fused_infer_attention_score

    def call(query, key, value, **how):
        return real(query, key, value, **change(how))

    monkeypatch.setattr(backend.torch_npu, "npu_fused_infer_attention_score", call)


def differences(values):
    return [b - a for a, b in zip([0, *values], values, strict=False)]


def query_lengths_of_each_request(monkeypatch):
    def change(call):
        if "actual_seq_lengths" in call:
            call["actual_seq_lengths"] = differences(call["actual_seq_lengths"])
        return call

    changed(monkeypatch, change)


def cumulative_lengths_of_the_cache(monkeypatch):
    def change(call):
        if "block_table" in call:
            call["actual_seq_lengths_kv"] = list(accumulate(call["actual_seq_lengths_kv"]))
        return call

    changed(monkeypatch, change)


def key_lengths_of_each_request(monkeypatch):
    def change(call):
        if "block_table" not in call:
            call["actual_seq_lengths_kv"] = differences(call["actual_seq_lengths_kv"])
        return call

    changed(monkeypatch, change)


def mask_inverted(monkeypatch):
    def change(call):
        if call.get("atten_mask") is not None:
            call["atten_mask"] = call["atten_mask"].logical_not()
        return call

    changed(monkeypatch, change)


def block_table_ignored(monkeypatch):
    def change(call):
        if "block_table" in call:
            table = call["block_table"]
            call["block_table"] = torch.arange(table.numel(), dtype=torch.int32).view(table.shape)
        return call

    changed(monkeypatch, change)


def blocks_of_another_request(monkeypatch):
    def change(call):
        if "block_table" in call:
            call["block_table"] = call["block_table"].flip(0).contiguous()
        return call

    changed(monkeypatch, change)


def cached_keys_ignored(monkeypatch):
    monkeypatch.setattr(metadata, "state_of", lambda *lengths: AttentionState.PREFILL_NO_CACHE)


def window_dropped(monkeypatch):
    init = AscendAttentionImpl.__init__

    def without(self, *args, **how):
        init(self, *args, **{**how, "sliding_window": None})

    monkeypatch.setattr(AscendAttentionImpl, "__init__", without)


def window_of_one_more(monkeypatch):
    init = AscendAttentionImpl.__init__

    def wider(self, *args, **how):
        init(self, *args, **{**how, "sliding_window": how["sliding_window"] + 1})

    monkeypatch.setattr(AscendAttentionImpl, "__init__", wider)


def window_left_to_the_operator(monkeypatch):
    """As for prefill; with one query a request the operator ignores it."""
    monkeypatch.setattr(AscendAttentionImpl, "_window_decode", AscendAttentionImpl._paged)


def causal_from_the_left(monkeypatch):
    changed(monkeypatch, lambda call: {**call, "sparse_mode": 2 if "sparse_mode" in call else 0})


def no_mask(monkeypatch):
    changed(monkeypatch, lambda call: {**call, "sparse_mode": 0, "atten_mask": None})


def scale_forgotten(monkeypatch):
    changed(monkeypatch, lambda call: {k: v for k, v in call.items() if k != "scale"})


def cache_not_written(monkeypatch):
    monkeypatch.setattr(backend.torch_npu, "npu_scatter_pa_kv_cache", lambda *args, **how: None)


def values_for_keys(monkeypatch):
    real = backend.torch_npu.npu_scatter_pa_kv_cache
    monkeypatch.setattr(
        backend.torch_npu,
        "npu_scatter_pa_kv_cache",
        lambda key, value, *args, **how: real(value, key, *args, **how),
    )


NO_CACHE, HIT, DECODE, CHUNKED, SPECULATIVE = STEPS
FAULTS = [
    *[(swap_head_counts, state, None) for state in STEPS],
    *[(as_many_kv_heads_as_heads, state, None) for state in STEPS],
    *[(query_lengths_of_each_request, state, None) for state in (NO_CACHE, HIT, CHUNKED)],
    *[(cumulative_lengths_of_the_cache, state, None) for state in (HIT, DECODE, CHUNKED)],
    (key_lengths_of_each_request, NO_CACHE, None),
    *[(mask_inverted, state, None) for state in (NO_CACHE, HIT, CHUNKED, SPECULATIVE)],
    (mask_inverted, DECODE, 20),
    *[(block_table_ignored, state, None) for state in (HIT, DECODE, CHUNKED, SPECULATIVE)],
    *[(blocks_of_another_request, state, None) for state in (HIT, DECODE, CHUNKED)],
    *[(cached_keys_ignored, state, None) for state in (HIT, DECODE, CHUNKED, SPECULATIVE)],
    *[(window_dropped, state, 20) for state in STEPS],
    *[(window_of_one_more, state, 20) for state in STEPS],
    (window_left_to_the_operator, DECODE, 20),
    *[(causal_from_the_left, state, None) for state in (HIT, CHUNKED, SPECULATIVE)],
    *[(no_mask, state, None) for state in (NO_CACHE, HIT, CHUNKED, SPECULATIVE)],
    *[(scale_forgotten, state, None) for state in STEPS],
    *[(cache_not_written, state, None) for state in (HIT, DECODE, CHUNKED, SPECULATIVE)],
    *[(values_for_keys, state, None) for state in (HIT, DECODE, CHUNKED, SPECULATIVE)],
]


@pytest.mark.parametrize(
    ("fault", "state", "window"),
    [pytest.param(*f, id=f"{f[0].__name__}-{f[1].name}") for f in FAULTS],
)
def test_a_planted_fault_is_found(monkeypatch, fault, state, window):
    fault(monkeypatch)
    requests, decode_queries = STEPS[state]
    with pytest.raises((AssertionError, Refused, RuntimeError)):
        Layer(requests, window, decode_queries).check()


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"logits_soft_cap": 30.0}, "soft caps of the scores"),
        ({"alibi_slopes": [0.5] * HEADS}, "ALiBi slopes"),
        ({"sinks": torch.zeros(HEADS)}, "attention sinks"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"),
        ({"head_size": 256}, "heads of 256 channels"),
        ({"num_heads": 65, "num_kv_heads": 1}, "65 query heads with 1 key heads"),
        ({"num_heads": 5}, "5 query heads with 2 key heads"),
        ({"num_heads": 1024, "num_kv_heads": 1024}, "65536 elements a token"),
        ({"indexer": 1}, "indexer=1"),
    ],
)
def test_what_a_layer_cannot_have_is_refused_by_name(asked, reason):
    arguments = {"num_heads": HEADS, "head_size": SIZE, "scale": 1.0, "num_kv_heads": KV_HEADS}
    with pytest.raises(NotImplementedError, match=reason):
        AscendAttentionImpl(**{**arguments, **asked})


def test_quantised_outputs_and_other_blocks_are_refused():
    layer = Layer([(2, 0)])
    impl = AscendAttentionImpl(HEADS, SIZE, SCALE, KV_HEADS)
    q = torch.zeros(2, HEADS, SIZE, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="quantised output"):
        impl.forward(None, q, q, q, layer.cache, layer.step, q, output_scale=torch.ones(1))
    step = replace(layer.step, block_size=64)
    with pytest.raises(ValueError, match="blocks of 128 tokens, its metadata was built for 64"):
        impl.forward(None, q, q, q, layer.cache, step, q)
    large = torch.empty(2, (1 << 31) // (BLOCK * KV_HEADS * SIZE), BLOCK, KV_HEADS, SIZE,
                        dtype=torch.bfloat16, device="meta")  # fmt: skip
    with pytest.raises(ValueError, match="make the cache smaller"):
        impl.forward(None, q, q, q, large, layer.step, q)


def test_what_vllm_asks_the_class_for():
    refused = AscendAttentionBackend.validate_configuration(
        head_size=80, dtype=torch.float32, kv_cache_dtype="fp8", block_size=16, use_mla=True,
        has_sink=True, use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False,
        device_capability=None, attn_type="encoder_only",
    )  # fmt: skip
    text = "; ".join(refused)
    for part in ("head_size", "dtype", "kv_cache_dtype", "block_size", "MLA", "sink", "encoder"):
        assert part in text, part
