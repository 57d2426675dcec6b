"""The conformance kit is tested itself: right operators pass, planted faults are found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm_fl_reference")

from kit_runs import found, implementation, is_right, run  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from vllm_fl.dispatch.ops import CATALOGUE  # noqa: E402
from vllm_fl.dispatch.types import Decision  # noqa: E402
from vllm_fl.testing.operators import all_cases  # noqa: E402
from vllm_fl.testing.target import find_target  # noqa: E402
from vllm_fl_reference.ops import activation, norm, rotary  # noqa: E402

# -- right implementations


@pytest.mark.parametrize("op_name", [op for op in CATALOGUE if op != "attention_backend"])
def test_the_reference_passes(op_name: str) -> None:
    (impl,) = [i for i in find_target("reference").implementations if i.op_name == op_name]
    ended = run(impl)
    assert len(ended) == len(all_cases()[op_name])
    assert is_right(ended), ended


def test_every_operator_has_cases() -> None:
    assert [op for op, cases in all_cases().items() if not cases] == []


def in_place_rotary(query, key, cos, sin, position_ids, is_neox_style):
    for x in (query, key):
        if x is not None:
            rotated, _ = rotary.rotary_embedding(x, None, cos, sin, position_ids, is_neox_style)
            x.copy_(rotated)
    return query, key


def in_place_add(x, residual, weight, epsilon):
    if residual is None:
        return norm.rms_norm(x, None, weight, epsilon)
    out, total = norm.rms_norm(x, residual, weight, epsilon)
    return x.copy_(out), residual.copy_(total)


def normalises_the_rounded_sum(x, residual, weight, epsilon):
    if residual is None:
        return norm.rms_norm(x, None, weight, epsilon)
    total = x + residual
    return norm.rms_norm(total, None, weight, epsilon), total


@pytest.mark.parametrize(
    ("op_name", "fn"),
    [
        ("rotary_embedding", in_place_rotary),
        ("rms_norm", in_place_add),
        ("rms_norm", normalises_the_rounded_sum),
    ],
)
def test_other_ways_to_be_right_pass(op_name: str, fn: Callable[..., Any]) -> None:
    ended = run(implementation(op_name, fn))
    assert is_right(ended), ended


# -- wrong norms


def weight_in_fp32(x, residual, weight, epsilon):
    total = x.float() if residual is None else x.float() + residual.float()
    out = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float()
    return out.to(x.dtype) if residual is None else (out.to(x.dtype), total.to(x.dtype))


def epsilon_outside(x, residual, weight, epsilon):
    if residual is not None:
        return norm.rms_norm(x, residual, weight, epsilon)
    wide = x.float()
    unit = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + epsilon)
    return unit.to(x.dtype) * weight


def epsilon_forgotten(x, residual, weight, epsilon):
    return norm.rms_norm(x, residual, weight, 0.0)


def stride_ignored(x, residual, weight, epsilon):
    flat = torch.empty(x.shape, device="meta").stride()
    return norm.rms_norm(x.as_strided(x.shape, flat), residual, weight, epsilon)


def one_row_stride_for_all_ranks(x, residual, weight, epsilon):
    if residual is not None or x.dim() < 3:
        return norm.rms_norm(x, residual, weight, epsilon)
    rows = x.as_strided((x.numel() // x.shape[-1], x.shape[-1]), (x.stride(-2), x.stride(-1)))
    return norm.rms_norm(rows, None, weight, epsilon).view(x.shape)


def in_place_without_residual(x, residual, weight, epsilon):
    if residual is not None:
        return norm.rms_norm(x, residual, weight, epsilon)
    return x.copy_(norm.rms_norm(x, None, weight, epsilon))


def in_place_on_fp32(x, residual, weight, epsilon):
    out = norm.rms_norm(x, residual, weight, epsilon)
    x.float().mul_(2)  # a copy, unless x is fp32
    return out


def writes_past_the_end(x, residual, weight, epsilon):
    out = norm.rms_norm(x, residual, weight, epsilon)
    if residual is not None and x.is_contiguous():
        x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(0)
    return out


def squares_in_own_dtype(x, residual, weight, epsilon):
    total = x if residual is None else x + residual
    mean = total.pow(2).mean(-1, keepdim=True).float()
    out = (total.float() * torch.rsqrt(mean + epsilon)).to(x.dtype) * weight
    return out if residual is None else (out, total)


def sum_in_own_dtype(x, residual, weight, epsilon):
    if residual is not None:
        return norm.rms_norm(x, residual, weight, epsilon)
    mean = x.pow(2).sum(-1, keepdim=True) / x.shape[-1]
    return (x.float() * torch.rsqrt(mean.float() + epsilon)).to(x.dtype) * weight


def weight_forgotten(x, residual, weight, epsilon):
    return norm.rms_norm(x, residual, torch.ones_like(weight), epsilon)


def residual_not_summed(x, residual, weight, epsilon):
    if residual is None:
        return norm.rms_norm(x, None, weight, epsilon)
    return norm.rms_norm(x, residual, weight, epsilon)[0], residual


def residual_not_returned(x, residual, weight, epsilon):
    out = norm.rms_norm(x, residual, weight, epsilon)
    return out if residual is None else out[0]


def residual_with_the_strides_of_x(x, residual, weight, epsilon):
    if residual is not None and residual.stride() != x.stride():
        size = residual.untyped_storage().nbytes() // residual.element_size()
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        if residual.numel() and residual.storage_offset() + last < size:
            residual = residual.as_strided(x.shape, x.stride())
    return norm.rms_norm(x, residual, weight, epsilon)


def result_in_fp32(x, residual, weight, epsilon):
    out = norm.rms_norm(x, residual, weight, epsilon)
    return out.float() if residual is None else (out[0].float(), out[1])


def not_deterministic(x, residual, weight, epsilon):
    out = norm.rms_norm(x, residual, weight, epsilon)
    first = out if residual is None else out[0]
    first *= 1 + 1e-3 * (torch.rand(first.shape) < 0.1)
    return out


def offsets_in_32_bits(x, residual, weight, epsilon):
    if x.dim() == 2 and x.stride(0) >= 2**31:
        x = x.as_strided(x.shape, (x.stride(0) % 2**31, 1))
    return norm.rms_norm(x, residual, weight, epsilon)


def crash_without_tokens(x, residual, weight, epsilon):
    _ = x.shape[-1] // x.numel()
    return norm.rms_norm(x, residual, weight, epsilon)


_calls = itertools.count()


def right_every_other_time(x, residual, weight, epsilon):
    return norm.rms_norm(x, residual, weight * (1 + next(_calls) % 2), epsilon)


def host_decision(x, residual, weight, epsilon):
    if x.sum().item() > 1e30:
        return x
    return norm.rms_norm(x, residual, weight, epsilon)


def gemma_sum_in_16_bits(x, residual, weight, epsilon):
    return weight_in_fp32(x, residual, 1 + weight, epsilon)


def gemma_rounds_first(x, residual, weight, epsilon):
    return norm.rms_norm(x, residual, weight.float() + 1, epsilon) if residual is not None else (
        norm.rms_norm(x, None, torch.ones_like(weight), epsilon).float() * (weight.float() + 1)
    ).to(x.dtype)  # fmt: skip


# -- wrong rotary embeddings


def rotates_everything(query, key, cos, sin, position_ids, is_neox_style):
    repeat = query.shape[-1] // (2 * cos.shape[-1])
    cos, sin = torch.cat([cos] * repeat, -1), torch.cat([sin] * repeat, -1)
    return rotary.rotary_embedding(query, key, cos, sin, position_ids, is_neox_style)


def tail_through_fp16(query, key, cos, sin, position_ids, is_neox_style):
    q, k = rotary.rotary_embedding(query, key, cos, sin, position_ids, is_neox_style)
    q[..., 2 * cos.shape[-1] :] = q[..., 2 * cos.shape[-1] :].half()
    return q, k


def style_swapped(query, key, cos, sin, position_ids, is_neox_style):
    return rotary.rotary_embedding(query, key, cos, sin, position_ids, not is_neox_style)


def cos_and_sin_swapped(query, key, cos, sin, position_ids, is_neox_style):
    return rotary.rotary_embedding(query, key, sin, cos, position_ids, is_neox_style)


def positions_ignored(query, key, cos, sin, position_ids, is_neox_style):
    count = torch.arange(len(position_ids))
    return rotary.rotary_embedding(query, key, cos, sin, count, is_neox_style)


def key_forgotten(query, key, cos, sin, position_ids, is_neox_style):
    return rotary.rotary_embedding(query, None, cos, sin, position_ids, is_neox_style)[0], key


def key_required(query, key, cos, sin, position_ids, is_neox_style):
    q, k = rotary.rotary_embedding(query, key, cos, sin, position_ids, is_neox_style)
    return q, q if k is None else k


def table_stride_ignored(query, key, cos, sin, position_ids, is_neox_style):
    flat = (cos.shape[1], 1)
    cos, sin = cos.as_strided(cos.shape, flat), sin.as_strided(sin.shape, flat)
    return rotary.rotary_embedding(query, key, cos, sin, position_ids, is_neox_style)


def writes_over_neighbours(query, key, cos, sin, position_ids, is_neox_style):
    q, k = rotary.rotary_embedding(query, key, cos, sin, position_ids, is_neox_style)
    flat = torch.empty(query.shape, device="meta").stride()
    query.as_strided(query.shape, flat).copy_(q)
    return q, k


def angle_in_own_dtype(query, key, cos, sin, position_ids, is_neox_style):
    rows = position_ids.to(query.dtype).long().clamp(0, len(cos) - 1)
    return rotary.rotary_embedding(query, key, cos, sin, rows, is_neox_style)


# -- wrong activations


def gate_and_up_swapped(x):
    gate, up = x.chunk(2, -1)
    return gate * functional.silu(up)


def halves_interleaved(x):
    return functional.silu(x[..., ::2]) * x[..., 1::2]


def view_of_the_input(x):
    out = x[..., : x.shape[-1] // 2]
    return out.copy_(activation.silu_and_mul(x))


def tail_not_filled(x):
    out = activation.silu_and_mul(x)
    out[..., out.shape[-1] // 8 * 8 :] = 0
    return out


def exponential_overflows(x):
    gate, up = x.float().chunk(2, -1)
    return (gate * gate.exp() / (1 + gate.exp()) * up).to(x.dtype)


def always_tanh(x, approximate="none"):
    return activation.gelu_and_mul(x, "tanh")


def always_erf(x, approximate="none"):
    return activation.gelu_and_mul(x, "none")


@torch.library.custom_op("vllm_fl_kit::silu_without_fake", mutates_args=())
def silu_without_fake(x: Tensor) -> Tensor:
    return activation.silu_and_mul(x)


@torch.library.custom_op("vllm_fl_kit::silu_with_fake", mutates_args=())
def silu_with_fake(x: Tensor) -> Tensor:
    return activation.silu_and_mul(x)


@silu_with_fake.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


FAULTS = [
    ("rms_norm", weight_in_fp32, "*/rounding/bfloat16-*"),
    ("rms_norm", epsilon_outside, "*/values/*small_epsilon*"),
    ("rms_norm", epsilon_forgotten, "*/values/*small_epsilon*"),
    ("rms_norm", stride_ignored, "*/values/*3x24-wide_rows"),
    ("rms_norm", one_row_stride_for_all_ranks, "*/values/*packed_heads"),
    ("rms_norm", in_place_without_residual, "*/contract/*"),
    ("rms_norm", in_place_on_fp32, "*/contract/float32-*"),
    ("rms_norm", writes_past_the_end, "*/contract/*residual*"),
    ("rms_norm", squares_in_own_dtype, "*/values/float16-large_256*"),
    ("rms_norm", sum_in_own_dtype, "*/values/float16-large_32"),
    ("rms_norm", weight_forgotten, "*/values/*"),
    ("rms_norm", residual_not_summed, "*/values/*residual*"),
    ("rms_norm", residual_not_returned, "*/values/*residual*"),
    ("rms_norm", residual_with_the_strides_of_x, "*/values/*residual*"),
    ("rms_norm", result_in_fp32, "*/contract/*float16*"),
    ("rms_norm", not_deterministic, "*/determinism/*"),
    ("rms_norm", offsets_in_32_bits, "*/offsets/*"),
    ("rms_norm", right_every_other_time, "*/values/*"),
    ("gemma_rms_norm", gemma_sum_in_16_bits, "*/rounding/bfloat16-not_sum_*"),
    ("gemma_rms_norm", gemma_rounds_first, "*/rounding/bfloat16-not_normalised_*"),
    ("gemma_rms_norm", norm.rms_norm, "*/values/*"),
    ("rotary_embedding", rotates_everything, "*/values/*-rotary32-*"),
    ("rotary_embedding", tail_through_fp16, "*/values/*float32-*-rotary32-*"),
    ("rotary_embedding", style_swapped, "*/values/*"),
    ("rotary_embedding", cos_and_sin_swapped, "*/values/*"),
    ("rotary_embedding", positions_ignored, "*/values/*"),
    ("rotary_embedding", key_forgotten, "*/values/*"),
    ("rotary_embedding", key_required, "*/contract/*4+0x*"),
    ("rotary_embedding", table_stride_ignored, "*/values/*-halves"),
    ("rotary_embedding", writes_over_neighbours, "*/contract/*-qkv"),
    ("rotary_embedding", angle_in_own_dtype, "*/values/*-long-*"),
    ("silu_and_mul", gate_and_up_swapped, "*/values/*"),
    ("silu_and_mul", halves_interleaved, "*/values/*"),
    ("silu_and_mul", view_of_the_input, "*/contract/*"),
    ("silu_and_mul", tail_not_filled, "*/values/*-3x24-*"),
    ("silu_and_mul", exponential_overflows, "*/values/*-extreme"),
    ("gelu_and_mul", always_tanh, "*/values/bfloat16-tail-none"),
    ("gelu_and_mul", always_erf, "*/values/bfloat16-tail-tanh"),
]
CRASHES = [
    ("rms_norm", crash_without_tokens, "*/values/*0x64*", "ZeroDivisionError"),
    ("rms_norm", host_decision, "*/compile/*", ""),
    ("silu_and_mul", silu_without_fake, "*/opcheck/*", "OpCheckError"),
]


def name(fault: Any) -> str:
    return getattr(fault, "__name__", None) or getattr(fault, "_name", "")


@pytest.mark.parametrize(
    ("op_name", "fn", "pattern"), FAULTS, ids=[f"{op}-{name(fn)}" for op, fn, _ in FAULTS]
)
def test_a_planted_fault_is_found(op_name: str, fn: Any, pattern: str) -> None:
    ended = run(implementation(op_name, fn), pattern)
    assert found(ended), ended


@pytest.mark.parametrize(
    ("op_name", "fn", "pattern", "error"),
    CRASHES,
    ids=[f"{op}-{name(fn)}" for op, fn, _, _ in CRASHES],
)
def test_a_planted_crash_is_found(op_name: str, fn: Any, pattern: str, error: str) -> None:
    ended = run(implementation(op_name, fn), pattern)
    assert [end for end in ended.values() if end.startswith("crashed: ") and error in end], ended


def test_a_right_torch_operator_passes_torchs_own_check() -> None:
    impl = implementation("silu_and_mul", silu_with_fake, traceable=False)
    assert set(run(impl, "*/opcheck/*").values()) == {"passed"}
    opaque = "skipped: it declares itself opaque to torch.compile"
    assert set(run(impl, "*/compile/*").values()) == {opaque}


@pytest.mark.parametrize("answer", [Decision.no("no fp32"), "no fp32"])
def test_what_an_implementation_declines_is_reported(answer: object) -> None:
    def supports(x: Tensor) -> object:
        return answer if x.dtype == torch.float32 else True

    impl = implementation("silu_and_mul", activation.silu_and_mul, supports=supports)
    ended = run(impl, "*/values/*")
    assert {end for case, end in ended.items() if "/float32-" in case} == {"declined: no fp32"}
    assert {end for case, end in ended.items() if "float16-" in case} == {"passed"}


def test_what_an_implementation_declares_is_believed() -> None:
    impl = implementation("silu_and_mul", activation.silu_and_mul, dtypes=("bfloat16",))
    ended = run(impl, "*/values/*")
    assert {end for case, end in ended.items() if "/bfloat16-" in case} == {"passed"}
    assert "declined: dtype float32 is not among bfloat16" in ended.values()
    impl = implementation("silu_and_mul", activation.silu_and_mul, min_arch=999)
    (reason,) = set(run(impl, "*/values/*").values())
    assert reason.startswith("declined: it needs architecture 999, this device has ")
