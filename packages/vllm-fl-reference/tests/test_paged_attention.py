"""Paged attention against a float64 oracle that looks at one request and one query at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fl_reference.attention.paged import paged_attention, write_kv_cache
from vllm_fl_reference.attention.planning import (
    DEFAULT_LIMITS,
    TileLimits,
    plan_attention,
    plan_cache_write,
)

PROPERTY = settings(deadline=None, derandomize=True, max_examples=200)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Outputs are averages of values around 1. The fused bf16 path also rounds the weights.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}
SMALL = TileLimits(scores=64, keys=32, queries=3, min_queries=1)


@dataclass(frozen=True)
class Case:
    """A step: requests as (history, new tokens), a layer's shape, and its options."""

    requests: tuple[tuple[int, int], ...] = ((0, 5), (7, 1), (16, 4))
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (16, 16)
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    layout: str = "token-major"
    window: int | None = None
    causal: tuple[bool, ...] | bool = True
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    limits: TileLimits = DEFAULT_LIMITS
    seed: int = 0

    @property
    def seq_lens(self) -> list[int]:
        return [history + new for history, new in self.requests]

    @property
    def query_start(self) -> list[int]:
        starts = [0]
        for _, new in self.requests:
            starts.append(starts[-1] + new)
        return starts

    @property
    def scale(self) -> float:
        return self.sizes[0] ** -0.5


@dataclass
class Step:
    """Tensors of a case. Whatever no request owns is NaN."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    cache: Tensor
    block_table: Tensor
    slots: Tensor
    sinks: Tensor | None
    slopes: Tensor | None


def empty_cache(case: Case, num_blocks: int) -> Tensor:
    heads, block_size, width = case.heads[1], case.block_size, sum(case.sizes)
    if case.layout == "token-major":
        memory = torch.full((num_blocks, block_size, heads, width), torch.nan, dtype=case.dtype)
        return memory.transpose(1, 2)
    if case.layout == "head-major":
        return torch.full((num_blocks, heads, block_size, width), torch.nan, dtype=case.dtype)
    memory = torch.full((num_blocks, 2, block_size + 1, heads, width), torch.nan, dtype=case.dtype)
    return memory[:, 1, :block_size].transpose(1, 2)


def prepare(case: Case) -> Step:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(case.dtype)

    needed = [-(-seq_len // case.block_size) for seq_len in case.seq_lens]
    num_blocks = sum(needed) + 3
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    cache = empty_cache(case, num_blocks)
    # Columns that no request needs hold numbers that are no blocks at all.
    table = torch.full((len(needed), max(needed, default=0) + 1), 2**31 - 1, dtype=torch.int32)
    keys, values, slots = [], [], []
    for request, (history, new) in enumerate(case.requests):
        blocks = [order.pop() for _ in range(needed[request])]
        table[request, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        key = normal(history + new, case.heads[1], case.sizes[0])
        value = normal(history + new, case.heads[1], case.sizes[1])
        for token in range(history + new):
            block, offset = blocks[token // case.block_size], token % case.block_size
            if token < history:
                cache[block, :, offset] = torch.cat((key[token], value[token]), dim=-1)
            else:
                slots.append(block * case.block_size + offset)
        keys.append(key)
        values.append(value)
    return Step(
        query=2 * normal(case.query_start[-1], case.heads[0], case.sizes[0]),
        keys=keys,
        values=values,
        cache=cache,
        block_table=table,
        slots=torch.tensor(slots, dtype=torch.int64),
        sinks=torch.randn(case.heads[0], generator=generator) if case.sinks else None,
        slopes=torch.rand(case.heads[0], generator=generator) if case.alibi else None,
    )


def new_tokens(case: Case, per_request: list[Tensor]) -> Tensor:
    parts = [t[history:] for t, (history, _) in zip(per_request, case.requests, strict=True)]
    return torch.cat(parts)


def run(case: Case, step: Step) -> Tensor:
    key, value = new_tokens(case, step.keys), new_tokens(case, step.values)
    write_kv_cache(key, value, step.cache, plan_cache_write(step.slots, case.block_size))
    tiles = plan_attention(
        case.query_start,
        case.seq_lens,
        step.block_table,
        case.block_size,
        window=case.window,
        causal=case.causal,
        limits=case.limits,
    )
    output = torch.full((len(step.query), case.heads[0], case.sizes[1]), 7.0, dtype=case.dtype)
    paged_attention(
        step.query,
        step.cache,
        tiles,
        case.scale,
        output,
        soft_cap=case.soft_cap,
        sinks=step.sinks,
        alibi_slopes=step.slopes,
    )
    return output


def oracle(case: Case, step: Step) -> Tensor:
    rows = []
    group = case.heads[0] // case.heads[1]
    for request, (history, new) in enumerate(case.requests):
        causal = case.causal if isinstance(case.causal, bool) else case.causal[request]
        key, value = step.keys[request].double(), step.values[request].double()
        for i in range(new):
            position = history + i
            query = step.query[case.query_start[request] + i].double()
            visible = [
                p
                for p in range(history + new)
                if (not causal or p <= position)
                and (case.window is None or abs(position - p) <= case.window - 1)
            ]
            heads = []
            for head in range(case.heads[0]):
                logits = key[visible, head // group] @ query[head] * case.scale
                if case.soft_cap is not None:
                    logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
                if step.slopes is not None:
                    distance = torch.tensor([abs(position - p) for p in visible])
                    logits = logits - step.slopes[head].double() * distance
                weights = logits.exp()
                total = weights.sum()
                if step.sinks is not None:
                    total = total + step.sinks[head].double().exp()
                heads.append(weights / total @ value[visible, head // group])
            rows.append(torch.stack(heads))
    return torch.stack(rows).to(case.dtype)


def check(case: Case, reference: Case | None = None) -> None:
    """Run ``case`` and compare with the oracle, given ``reference`` if that differs."""
    step = prepare(case)
    expected = oracle(case if reference is None else reference, step)
    out = run(case, step)
    assert not out.isnan().any(), "unwritten cache reached the output"
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[case.dtype])


cases = st.builds(
    Case,
    requests=st.lists(
        st.tuples(st.sampled_from([0, 1, 3, 4, 5, 8, 17, 40]), st.integers(1, 9)),
        min_size=1,
        max_size=5,
    ).map(tuple),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (5, 1)]),
    sizes=st.sampled_from([(8, 8), (16, 16), (46, 46), (24, 16), (80, 80)]),
    block_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["token-major", "head-major", "padded pages"]),
    window=st.sampled_from([None, None, 1, 2, 4, 5, 16]),
    causal=st.booleans(),
    soft_cap=st.sampled_from([None, None, 1.5]),
    sinks=st.booleans(),
    alibi=st.sampled_from([False, False, True]),
    limits=st.sampled_from([DEFAULT_LIMITS, SMALL]),
    seed=st.integers(0, 99),
)


@PROPERTY
@given(cases)
def test_matches_the_oracle(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 3.0}], ids=["fused", "explicit"])
@pytest.mark.parametrize("size", [16, 32, 46, 64, 80, 96, 112, 192, 256, 512])
def test_head_sizes(size: int, options: dict[str, float]) -> None:
    for dtype in DTYPES:
        check(Case(requests=((9, 1), (3, 2)), sizes=(size, size), dtype=dtype, **options))


@pytest.mark.parametrize("history", [0, 1, 4, 5, 15, 16, 17])
@pytest.mark.parametrize("block_size", [4, 16])
def test_prefix_lengths_around_a_block(history: int, block_size: int) -> None:
    check(Case(requests=((history, 6), (history, 1)), block_size=block_size))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("new", [1, 7])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8])
def test_the_window_counts_the_current_token(window: int, new: int, causal: bool) -> None:
    case = Case(requests=((11, new),), window=window, causal=causal)
    check(case)
    for wrong in (window - 1, window + 1):
        if wrong > 0:
            with pytest.raises(AssertionError):
                check(case, reference=replace(case, window=wrong))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 3, 6, 30])
@pytest.mark.parametrize("block_size", [1, 4])
def test_windows_of_queries_cut_into_pieces(block_size: int, window: int, causal: bool) -> None:
    requests = ((13, 11), (2, 8), (0, 1))
    check(Case(requests, block_size=block_size, window=window, causal=causal, limits=SMALL))


def test_a_window_of_one_sees_the_token_itself() -> None:
    case = Case(window=1)
    step = prepare(case)
    value = new_tokens(case, step.values).repeat_interleave(2, dim=1)
    torch.testing.assert_close(run(case, step), value)


def test_blocks_outside_the_window_are_not_read() -> None:
    case = Case(requests=((37, 3),), window=5)
    step = prepare(case)
    expected = oracle(case, step)
    # Keys 33 and later are visible to the first query; vLLM frees the blocks before.
    step.block_table[0, : 33 // case.block_size] = 0
    torch.testing.assert_close(run(case, step), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "wrong", [{"causal": False}, {"window": 6}, {"soft_cap": 0.5}, {"soft_cap": None}], ids=str
)
def test_wrong_options_are_noticed(wrong: dict[str, Any]) -> None:
    case = Case(soft_cap=1.0)
    check(case)
    with pytest.raises(AssertionError):
        check(case, reference=replace(case, **wrong))


def test_the_order_of_blocks_matters() -> None:
    case = Case()
    step = prepare(case)
    expected = oracle(case, step)
    step.block_table[2, [0, 1]] = step.block_table[2, [1, 2]]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(run(case, step), expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("name", ["sinks", "slopes"])
def test_sinks_and_slopes_matter(name: str) -> None:
    case = Case(sinks=True, alibi=True)
    step = prepare(case)
    expected = oracle(case, step)
    setattr(step, name, -getattr(step, name))
    assert (run(case, step) - expected).abs().max() > 100 * TOLERANCE[case.dtype]


@pytest.mark.parametrize("value", [-1e30, 40.0, 1e4])
def test_extreme_sinks(value: float) -> None:
    case = Case(sinks=True)
    step = prepare(case)
    plain = oracle(replace(case, sinks=False), replace(step, sinks=None))
    step.sinks = torch.full((case.heads[0],), value)
    expected = plain if value < 0 else torch.zeros_like(plain)
    torch.testing.assert_close(run(case, step), expected, rtol=0, atol=2e-5)


def test_large_logits_do_not_average_the_values() -> None:
    case = Case(requests=((20, 4),), dtype=torch.float16)
    step = prepare(case)
    step.query = step.query * 100
    torch.testing.assert_close(run(case, step), oracle_stable(case, step), rtol=0, atol=2e-3)


def oracle_stable(case: Case, step: Step) -> Tensor:
    rows = []
    for i in range(4):
        key = step.keys[0][: 21 + i].double().repeat_interleave(2, dim=1)
        value = step.values[0][: 21 + i].double().repeat_interleave(2, dim=1)
        logits = torch.einsum("hd,khd->hk", step.query[i].double(), key) * case.scale
        rows.append(torch.einsum("hk,khd->hd", logits.softmax(dim=-1), value))
    return torch.stack(rows).to(case.dtype)


def test_each_request_may_have_its_own_causality() -> None:
    case = Case(requests=((3, 4), (3, 4), (0, 5)), causal=(True, False, False))
    check(case)
    with pytest.raises(AssertionError):
        check(case, reference=replace(case, causal=(False, True, False)))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 29])
@pytest.mark.parametrize("window", [None, 6])
def test_chunked_prefill_gives_the_same_tokens(chunk: int, window: int | None) -> None:
    whole = Case(requests=((0, 29),), window=window)
    step = prepare(whole)
    expected = oracle(whole, step)
    key, value, query, slots = step.keys[0], step.values[0], step.query, step.slots
    for start in range(0, 29, chunk):
        end = min(29, start + chunk)
        case = replace(whole, requests=((start, end - start),))
        part = replace(
            step,
            query=query[start:end],
            slots=slots[start:end],
            keys=[key[:end]],
            values=[value[:end]],
        )
        out = run(case, part)
        torch.testing.assert_close(out, expected[start:end], rtol=0, atol=2e-5)


def test_one_long_request_among_many_short_ones() -> None:
    case = Case(requests=((999, 1),) + ((5, 1),) * 20 + ((0, 30),))
    check(case)
    step = prepare(case)
    tiles = plan_attention(case.query_start, case.seq_lens, step.block_table, case.block_size)
    assert sum(tile.mask.numel() for tile in tiles) < 2 * sum(
        new * (history + new + case.block_size) for history, new in case.requests
    )


@pytest.mark.parametrize("layout", ["token-major", "head-major", "padded pages"])
@pytest.mark.parametrize("size", [8, 46, 80])
@pytest.mark.parametrize("dtype", DTYPES)
def test_writing_leaves_every_other_byte_alone(layout: str, size: int, dtype: torch.dtype) -> None:
    case = Case(layout=layout, sizes=(size, size), dtype=dtype)
    cache = empty_cache(case, 6)
    cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.clone()
    slots = torch.tensor([-1, 0, 23, -1, 6], dtype=torch.int32)
    key, value = torch.randn(7, 2, size).to(dtype), torch.randn(7, 2, size).to(dtype)
    write_kv_cache(key, value, cache, plan_cache_write(slots, case.block_size))
    for row, (block, offset) in {1: (0, 0), 2: (5, 3), 4: (1, 2)}.items():
        assert torch.equal(cache[block, :, offset], torch.cat((key[row], value[row]), dim=-1))
        before[block, :, offset] = cache[block, :, offset]
    assert torch.equal(cache, before)


def test_padding_only_writes_nothing() -> None:
    case = Case()
    cache = empty_cache(case, 2)
    cache.fill_(3.0)
    key = torch.randn(4, 2, 16)
    write_kv_cache(key, key, cache, plan_cache_write(torch.full((4,), -1), case.block_size))
    write_kv_cache(key[:0], key[:0], cache, plan_cache_write(torch.empty(0), case.block_size))
    assert (cache == 3.0).all()


def test_keys_without_a_slot_are_padding() -> None:
    case = Case()
    cache = empty_cache(case, 2)
    key = torch.randn(4, 2, 16)
    write_kv_cache(key, key, cache, plan_cache_write(torch.tensor([3, 4]), case.block_size))
    assert torch.equal(cache[0, :, 3], torch.cat((key[0], key[0]), dim=-1))
    assert torch.equal(cache[1, :, 0], torch.cat((key[1], key[1]), dim=-1))
    assert cache.isnan().sum() == cache.numel() - 2 * 2 * 32


def test_rows_of_padding_tokens_are_left_alone() -> None:
    case = Case()
    step = prepare(case)
    expected = oracle(case, step)
    tokens = len(step.query)
    step.query = torch.cat((step.query, torch.full_like(step.query[:3], torch.nan)))
    out = run(case, step)
    torch.testing.assert_close(out[:tokens], expected, rtol=0, atol=2e-5)
    assert (out[tokens:] == 7.0).all()


def test_a_cache_of_lower_precision_is_read_and_written() -> None:
    case = Case()
    step = prepare(case)
    step.cache = step.cache.to(torch.bfloat16)
    out = run(case, step)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, oracle(case, step), rtol=0, atol=3e-2)


def test_strided_queries_keys_and_values() -> None:
    case = Case(requests=((4, 3), (0, 2)), heads=(4, 2), sizes=(8, 8))
    step = prepare(case)
    expected = oracle(case, step)
    packed = torch.cat(
        (
            step.query.flatten(1),
            new_tokens(case, step.keys).flatten(1),
            new_tokens(case, step.values).flatten(1),
        ),
        dim=1,
    )
    query, key, value = packed.split([32, 16, 16], dim=1)
    tiles = plan_attention(case.query_start, case.seq_lens, step.block_table, case.block_size)
    out = torch.empty(5, 64).view(5, 4, 16)[..., 8:]
    slots = plan_cache_write(step.slots, case.block_size)
    write_kv_cache(key.view(5, 2, 8), value.view(5, 2, 8), step.cache, slots)
    paged_attention(query.view(5, 4, 8), step.cache, tiles, case.scale, out)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)


def test_a_step_without_queries() -> None:
    table = torch.zeros(2, 1, dtype=torch.int32)
    assert plan_attention([0, 0, 0], [5, 0], table, 4) == ()
    assert plan_attention([0], [], table[:0], 4) == ()
    paged_attention(torch.empty(0, 4, 8), torch.empty(1, 2, 4, 16), (), 1.0, torch.empty(0, 4, 8))


def test_offsets_are_computed_in_64_bits() -> None:
    slots = torch.tensor([2**31 - 1], dtype=torch.int32)
    planned = plan_cache_write(slots, 16)
    assert planned.blocks.dtype == planned.offsets.dtype == torch.int64
    assert (planned.blocks.item(), planned.offsets.item()) == (2**27 - 1, 15)
    planned = plan_cache_write(torch.tensor([2**40 + 5]), 16)
    assert (planned.blocks.item(), planned.offsets.item()) == (2**36, 5)


def test_a_cache_beyond_32_bit_offsets() -> None:
    # Two blocks 4 GiB apart: address space is reserved, a few pages are touched.
    memory = torch.empty(2**31 + 4096, dtype=torch.float16)
    cache = memory.as_strided((2, 1, 4, 16), (2**31, 16, 16, 1))
    key = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0)).half()
    write_kv_cache(key, 2 * key, cache, plan_cache_write(torch.tensor([0, 5]), 4))
    assert torch.equal(memory[2**31 + 16 : 2**31 + 24], key[1, 0])
    assert torch.equal(memory[:8], key[0, 0])
    out = torch.zeros(1, 1, 8, dtype=torch.float16)
    tiles = plan_attention([0, 1], [2], torch.tensor([[1]]), 4, window=1)
    paged_attention(key[:1], cache, tiles, 1.0, out)
    assert torch.equal(out, 2 * key[1:])


def refuse(match: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=match):
        call()


def test_arguments_that_do_not_fit_are_refused() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    cache = torch.zeros(1, 2, 4, 16)
    query = torch.zeros(1, 4, 8)
    refuse("3 query tokens but a sequence of 2", lambda: plan_attention([0, 3], [2], table, 4))
    refuse("at least 1, got 0", lambda: plan_attention([0, 1], [2], table, 4, window=0))
    refuse("8 \\+ 9", lambda: paged_attention(query, cache, (), 1.0, torch.zeros(1, 4, 9)))
    odd = torch.zeros(1, 3, 8)
    refuse("3 query heads are not a multiple", lambda: paged_attention(odd, cache, (), 1.0, odd))
    slots = plan_cache_write(torch.zeros(1), 4)
    refuse("4 \\+ 8", lambda: write_kv_cache(query[..., :4], query, cache, slots))


def test_limits_bound_every_tile() -> None:
    case = Case(requests=((100, 50), (0, 50), (60, 1), (61, 1), (62, 1)), limits=SMALL)
    step = prepare(case)
    tiles = plan_attention(
        case.query_start, case.seq_lens, step.block_table, case.block_size, limits=SMALL
    )
    for tile in tiles:
        rows, queries, _ = tile.shape
        assert queries <= SMALL.queries
        assert rows == 1 or tile.mask.numel() <= SMALL.scores
    covered = torch.cat([tile.output_rows for tile in tiles])
    assert torch.equal(covered.sort().values, torch.arange(case.query_start[-1]))
    assert math.prod(tiles[0].shape[:2]) == len(tiles[0].query_rows)
