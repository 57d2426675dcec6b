"""Both attention kernels against float64, over a paged cache with NaN in every unused slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import paged
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import DTYPES, PROPERTY, TOLERANCES
from torch import Tensor

from vllm_fl_flaggems import tiles
from vllm_fl_flaggems.attention import planning
from vllm_fl_flaggems.attention.planning import ANY_LENGTH, Mathematics, attend, short_queries
from vllm_fl_flaggems.kernels import attention_prefill

SCALE = 0.4
GUARD = 7.0


@pytest.fixture(autouse=True, scope="module")
def _few_parts() -> Any:
    """Split requests into three parts at most: interpreting an idle program takes milliseconds."""
    patch = pytest.MonkeyPatch()
    patch.setattr(tiles, "_MOST_SPLITS", 3)
    tiles.decode_tile.cache_clear()
    yield
    patch.undo()
    tiles.decode_tile.cache_clear()


def run(case: paged.Paged, layer: Mathematics) -> Tensor:
    out = torch.full((len(case.query) + 2, *case.query.shape[1:]), GUARD, dtype=case.query.dtype)
    attend(out, case.query, case.keys, case.values, case.step, layer)
    assert bool((out[len(case.query) :] == GUARD).all())
    return out[: len(case.query)]


def check(case: paged.Paged, layer: Mathematics) -> None:
    """Compare; what cancels in a sum is allowed for, as in the conformance kit."""
    out, expected = run(case, layer), paged.oracle(case, layer)
    assert not bool(out.isnan().any())
    rtol, atol = TOLERANCES[str(out.dtype).removeprefix("torch.")]
    largest = max(float(value.abs().max()) for _, value in case.parts if len(value))
    excess = (out.double() - expected).abs() - rtol * expected.abs() - atol - rtol * largest
    assert float(excess.max()) <= 0


@settings(PROPERTY, max_examples=25)
@given(
    requests=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 20)), min_size=1, max_size=3),
    heads=st.sampled_from([(2, 2), (4, 2), (6, 2), (5, 1)]),
    size=st.sampled_from([16, 24, 32]),
    block_size=st.sampled_from([16, 48, 64, 128]),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([None, 1, 5, 40]),
    causal=st.sampled_from([True, True, False]),
    layout=st.sampled_from(["nhd", "hnd", "halves"]),
)
def test_any_step(
    requests: list[tuple[int, int]],
    heads: tuple[int, int],
    size: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    causal: bool,
    layout: str,
) -> None:
    if not any(count for _, count in requests):
        requests = [*requests, (3, 1)]
    case = paged.make(requests, heads, size, block_size, dtype, causal, window, layout)
    check(case, Mathematics(SCALE, window))


SINKS = torch.tensor([1.0, -3.0, 20.0, 0.5])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.mark.parametrize("requests", [[(100, 1), (0, 1), (7, 1)], [(33, 20), (0, 40), (90, 1)]])
@pytest.mark.parametrize(
    "layer",
    [
        Mathematics(SCALE, cap=2.0),
        Mathematics(SCALE, sinks=SINKS),
        Mathematics(SCALE, slopes=SLOPES),
        Mathematics(SCALE, window=6, cap=5.0, sinks=SINKS, slopes=SLOPES),
    ],
    ids=["cap", "sinks", "alibi", "all"],
)
def test_what_models_add(requests: list[tuple[int, int]], layer: Mathematics) -> None:
    check(paged.make(requests, window=layer.window), layer)


@pytest.mark.parametrize("cached", [1, 1 << 40])
def test_heads_in_turns_and_side_by_side(monkeypatch: pytest.MonkeyPatch, cached: int) -> None:
    monkeypatch.setattr(tiles, "_CACHED", cached)
    check(paged.make([(33, 40), (0, 50), (90, 1)], (6, 3)), Mathematics(SCALE))


@pytest.mark.parametrize("window", [None, 9])
def test_each_request_has_its_own_causality(window: int | None) -> None:
    requests = [(37, 1), (0, 40), (3, 20), (9, 1)]
    case = paged.make(requests, causal=[False, False, True, True], window=window)
    check(case, Mathematics(SCALE, window))


@pytest.mark.parametrize("size", [80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_head_sizes(size: int, dtype: torch.dtype) -> None:
    check(paged.make([(20, 20), (50, 1)], (2, 1), size, dtype=dtype), Mathematics(size**-0.5))


@pytest.mark.parametrize("heads", [(16, 1), (20, 1), (71, 1), (130, 1)])
def test_groups_that_fill_a_program_and_more(heads: tuple[int, int]) -> None:
    check(paged.make([(20, 3), (30, 1)], heads, dtype=torch.bfloat16), Mathematics(SCALE))


def test_many_requests_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than two vectors of the search, some without any query."""
    monkeypatch.setattr(attention_prefill, "_SEARCHED", tl.constexpr(16))
    requests = [(i % 5, (i * 7) % 4 and 1) for i in range(35)] + [(2, 20)]
    check(paged.make(requests, (1, 1)), Mathematics(SCALE))


@pytest.mark.parametrize(
    ("requests", "kernels"),
    [
        ([(40, 1), (3, 1)], {"decode"}),
        ([(40, 8), (3, 2)], {"decode"}),
        ([(40, 9), (3, 20)], {"prefill"}),
        ([(40, 1), (3, 9)], {"decode", "prefill"}),
    ],
)
def test_which_kernels_a_step_needs(
    monkeypatch: pytest.MonkeyPatch, requests: list[tuple[int, int]], kernels: set[str]
) -> None:
    assert short_queries(group=2) == 8
    ran = set()
    for name in ("decode", "prefill"):
        kernel = getattr(planning, name)

        def noting(*args: Any, name: str = name, kernel: Any = kernel, **kwargs: Any) -> None:
            ran.add(name)
            kernel(*args, **kwargs)

        monkeypatch.setattr(planning, name, noting)
    check(paged.make(requests), Mathematics(SCALE))
    assert ran == kernels


def test_a_captured_step_is_right_for_every_other() -> None:
    """What a graph of padded size runs: more requests than there are, bounds of any length."""
    for requests in ([(40, 1), (3, 1), (0, 0)], [(0, 30), (9, 2), (0, 0)], [(0, 0), (4, 30)]):
        case = paged.make(requests)
        case.step = dataclasses.replace(case.step, queries=ANY_LENGTH, tokens=len(case.query) + 2)
        padded = torch.cat((case.query, case.query.new_full((2, 4, 16), torch.nan)))
        out = torch.full(padded.shape, GUARD)
        attend(out, padded, case.keys, case.values, case.step, Mathematics(SCALE))
        torch.testing.assert_close(
            out[:-2].double(), paged.oracle(case, Mathematics(SCALE)), rtol=1e-5, atol=1e-5
        )
        assert bool((out[-2:] == GUARD).all())


def test_the_same_bits_twice_and_alone() -> None:
    """A decode's bits depend on the number of parts, not on what else is in the batch."""
    requests = [(100, 1), (37, 1), (64, 20)]
    case = paged.make(requests, dtype=torch.bfloat16)
    first, second = run(case, Mathematics(SCALE)), run(case, Mathematics(SCALE))
    assert torch.equal(first, second)
    step = dataclasses.replace(
        case.step, tokens=1, query_start=case.step.query_start[:2],
        lengths=case.step.lengths[:1], table=case.step.table[:1], queries=(1, 1),
    )  # fmt: skip
    alone = dataclasses.replace(case, query=case.query[:1], step=step)
    assert torch.equal(run(alone, Mathematics(SCALE)), first[:1])


def test_blocks_beyond_32_bits() -> None:
    """The last block used starts beyond 2^31 elements; no page of the memory between is touched."""
    case = paged.make([(10, 1), (0, 12)], dtype=torch.float16)
    expected = run(case, Mathematics(SCALE))
    before, last = case.keys.stride(0), int(case.step.table.max())
    stride = (2**31 // last // before + 1) * before
    base = torch.empty(stride * (len(case.keys) - 1) + before, dtype=torch.float16)
    whole = base.as_strided((*case.keys.shape[:3], 32), (stride, *case.keys.stride()[1:]))
    whole[..., :16], whole[..., 16:] = case.keys, case.values
    assert last * whole.stride(0) >= 2**31
    case.keys, case.values = whole[..., :16], whole[..., 16:]
    assert torch.equal(run(case, Mathematics(SCALE)), expected)
