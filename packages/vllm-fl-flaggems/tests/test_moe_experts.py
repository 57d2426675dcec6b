"""moe_sum and fused_experts against float64 and the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import DTYPES, LAYOUTS, PROPERTY, close, normal, place
from torch import Tensor

from vllm_fl.dispatch import (
    OpManager,
    SelectionPolicy,
    get_default_manager,
    reset_default_manager,
    reset_global_policy,
    set_global_policy,
    with_preference,
)
from vllm_fl.dispatch.compare import Comparison
from vllm_fl_flaggems.kernels.align import Choices
from vllm_fl_flaggems.moe_tiles import ExpertsTile, MatmulTile
from vllm_fl_flaggems.ops import experts, moe_sum
from vllm_fl_reference.ops import moe as reference

FEW = settings(PROPERTY, max_examples=12)
BOUND = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def near(actual: Tensor, expected: Tensor) -> None:
    """Compare with a float64 result, errors relative to the element or the typical one."""
    assert actual.shape == expected.shape
    size = torch.maximum(expected.abs(), expected.square().mean().sqrt()) + 1e-30
    assert float(((actual.double() - expected).abs() / size).max()) < BOUND[actual.dtype]


@FEW
@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 8, 17]),
    st.sampled_from([1, 3, 130, 300]),
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
)
def test_moe_sum(tokens: int, k: int, width: int, dtype: torch.dtype, layout: str) -> None:
    x, base = place(normal(tokens, k, width, seed=k), dtype, layout)
    before = base.clone()
    out = torch.full((tokens, width), torch.nan, dtype=dtype)
    moe_sum.moe_sum(x, out)
    close(out, x.double().sum(1))
    assert torch.equal(base, before)


def test_moe_sum_of_nothing() -> None:
    moe_sum.moe_sum(torch.empty(0, 2, 8), torch.empty(0, 8))
    assert "do not fit" in str(moe_sum.supports(torch.empty(3, 2, 8), torch.empty(3, 9)))
    assert "dtype" in str(moe_sum.supports(torch.empty(3, 2, 8), torch.empty(3, 8).half()))


def arguments(
    tokens: int, count: int, k: int, sizes: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    hidden, inner = sizes
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand((tokens, count), generator=generator).argsort(-1)[:, :k].int()
    return (
        normal(tokens, hidden, seed=1).to(dtype),
        (normal(count, 2 * inner, hidden, seed=2) * hidden**-0.5).to(dtype),
        (normal(count, hidden, inner, seed=3) * inner**-0.5).to(dtype),
        torch.rand((tokens, k), generator=generator),
        ids.contiguous(),
    )


def wide(x: Tensor, w1: Tensor, w2: Tensor, *rest: object) -> Tensor:
    return reference.fused_experts(x.double(), w1.double(), w2.double(), *rest).double()


@FEW
@given(
    st.sampled_from([1, 2, 9, 20]),
    st.sampled_from([(1, 1), (3, 2), (20, 3)]),
    st.sampled_from([(16, 16), (40, 24), (72, 33)]),
    st.sampled_from(DTYPES),
    st.sampled_from(["silu", "gelu"]),
    st.booleans(),
)
def test_fused_experts(
    tokens: int,
    experts_k: tuple[int, int],
    sizes: tuple[int, int],
    dtype: torch.dtype,
    activation: str,
    on_input: bool,
) -> None:
    call = arguments(tokens, *experts_k, sizes, dtype)
    before = [argument.clone() for argument in call]
    found = experts.fused_experts(*call, activation, on_input)
    near(found, wide(*call, activation, on_input))
    assert all(torch.equal(one, other) for one, other in zip(call, before, strict=True))


@pytest.mark.parametrize(
    ("rows", "direct", "swap", "group"),
    [
        (16, False, False, 1),
        (16, False, True, 4),
        (64, False, False, 4),
        (64, False, True, 1),
        (16, True, False, 4),
        (16, True, True, 1),
    ],
)
def test_every_way_to_cut(rows: int, direct: bool, swap: bool, group: int) -> None:
    x, w1, w2, weights, ids = arguments(12, 3, 2, (40, 24), torch.bfloat16)
    tile = MatmulTile(columns=32, depth=16, warps=4, stages=2, group=group, swap=swap)
    out = torch.empty_like(x)
    experts.run_experts(
        out, x, w1, w2, weights, Choices(ids, 3, 3, local=True), "silu", False,
        ExpertsTile(direct, rows, tile, replace(tile, depth=32)),
    )  # fmt: skip
    near(out, wide(x, w1, w2, weights, ids))


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bad_ids_and_maps(tokens: int, dtype: torch.dtype) -> None:
    x, w1, w2, weights, ids = arguments(tokens, 4, 3, (32, 16), torch.float32)
    ids[0, 0], ids[-1, 1] = -1, 99
    call = (x, w1, w2, weights, ids.to(dtype))
    near(experts.fused_experts(*call), wide(*call))
    expert_map = torch.tensor([-1, 2, -1, 0, 1, -1, 3, -1], dtype=torch.int32)
    mapped = ("silu", False, 8, expert_map)
    near(experts.fused_experts(*call, *mapped), wide(*call, *mapped))
    nowhere = ("silu", False, 8, torch.full_like(expert_map, -1))
    assert torch.equal(experts.fused_experts(*call, *nowhere), torch.zeros_like(x))


@pytest.fixture
def manager() -> Iterator[OpManager]:
    reset_default_manager()
    yield get_default_manager()
    reset_default_manager()
    reset_global_policy()


@pytest.mark.parametrize("tokens", [1, 12])
def test_sorting_and_sum_are_whoever_s_the_policy_says(manager: OpManager, tokens: int) -> None:
    call = arguments(tokens, 4, 3, (32, 16), torch.float32)
    call[-1][0, 0], call[-1][-1, 1] = -1, 99
    expert_map = torch.tensor([-1, 2, -1, 0, 1, -1, 3, -1], dtype=torch.int32)
    mapped = ("silu", False, 8, expert_map)
    expected = wide(*call, *mapped)
    sorting = ("moe_align_block_size",) if tokens > 1 else ()  # one token needs none
    for token, impl in (("reference", "reference.torch"), ("flagos", "default.flagos")):
        order = {"moe_align_block_size": [token], "moe_sum": [token]}
        set_global_policy(SelectionPolicy.from_dict(per_op_order=order))
        manager.count_calls()
        manager.counters.reset()
        with with_preference("vendor"):  # a step reads no context
            near(experts.fused_experts(*call, *mapped), expected)
        manager.count_calls(False)
        assert manager.counters.calls == {(op, impl): 1 for op in (*sorting, "moe_sum")}
        named = {(impl.op_name, impl.impl_id) for impl in manager.bound()}
        assert named >= {(op, impl) for op in (*sorting, "moe_sum")}


def test_a_step_resolves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    call = arguments(12, 4, 3, (32, 16), torch.float32)
    experts.fused_experts(*call)
    monkeypatch.setattr(OpManager, "resolve", None)
    monkeypatch.setattr(OpManager, "_resolution", None)
    with with_preference("reference"):
        near(experts.fused_experts(*call), wide(*call))


def test_the_sum_of_the_experts_is_compared(manager: OpManager) -> None:
    manager.comparison = Comparison({"moe_sum": "reference"}, None)
    call = arguments(12, 4, 3, (32, 16), torch.float32)
    experts.fused_experts(*call)
    assert manager.comparison.differences["moe_sum", 0].calls == 1


def test_rows_and_experts_far_from_contiguous() -> None:
    x, w1, w2, weights, ids = arguments(5, 3, 2, (24, 16), torch.float16)
    rows, _ = place(x.float(), torch.float16, "wide rows")
    up, _ = place(w1.float(), torch.float16, "wide rows")
    down, _ = place(w2.float(), torch.float16, "packed")
    cut = torch.cat((weights, weights), -1)[:, :2], torch.cat((ids, ids), -1)[:, :2]
    near(experts.fused_experts(rows, up, down, *cut), wide(x, w1, w2, weights, ids))


def test_no_tokens() -> None:
    x, w1, w2, weights, ids = arguments(1, 3, 2, (24, 16), torch.float16)
    assert experts.fused_experts(x[:0], w1, w2, weights[:0], ids[:0]).shape == (0, 24)


def test_unknown_activation() -> None:
    call = arguments(1, 3, 2, (24, 16), torch.float16)
    assert experts.supports(*call, "relu2") is True
    with pytest.raises(ValueError, match="one of silu, gelu, got 'relu2'"):
        experts.fused_experts(*call, "relu2")


def test_what_is_declined_has_a_reason() -> None:
    x, w1, w2, weights, ids = arguments(2, 3, 2, (24, 16), torch.float16)
    assert experts.supports(x, w1, w2, weights, ids) is True
    refused = {
        "w1 has dtype": (x, w1.float(), w2, weights, ids),
        "do not fit": (x, w1, w2[:, :, :8], weights, ids),
        "topk_weights has dtype": (x, w1, w2, weights.half(), ids),
        "other numbers": (x, w1, w2, weights[:1], ids),
        "topk_ids has dtype": (x, w1, w2, weights, ids.short()),
        "w2: the last": (x, w1, w2.transpose(1, 2), weights, ids),
    }
    for reason, call in refused.items():
        assert reason in str(experts.supports(*call))
    expert_map = torch.zeros(3, dtype=torch.int32)
    assert "vector of 6" in str(
        experts.supports(x, w1, w2, weights, ids, "silu", False, 6, expert_map)
    )


def test_a_row_depends_on_the_batch() -> None:
    """Why the backend refuses it where vLLM may not let that happen."""
    x, w1, w2, weights, ids = arguments(80, 2, 1, (160, 96), torch.float32)
    together = experts.fused_experts(x, w1, w2, weights, ids)
    alone = experts.fused_experts(x[:1], w1, w2, weights[:1], ids[:1])
    torch.testing.assert_close(together[:1], alone)
    assert not torch.equal(together[:1], alone)
