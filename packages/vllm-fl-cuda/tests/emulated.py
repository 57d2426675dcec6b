"""vLLM's compiled operators on the CPU, for tests on machines without a GPU.

It is a plug-in of pytest, and of vllm-fl (VLLM_FL_PLUGIN_MODULES) for the processes of an engine.

Each operator is declared with the schema that stands in the installed vLLM's own library, so a call
with a wrong argument, keyword or slot is refused as the real one refuses it. What it computes
follows the kernel's address arithmetic: a stride that the kernel does not look at is not looked at
here either, and what the kernel takes for granted is asserted.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

LIBRARIES = {"_C": "_C", "_C_cache_ops": "_C", "_moe_C": "_moe_C"}
"""Namespace of operators -> the library that defines them."""


def schemas(names: list[str], namespace: str) -> dict[str, str]:
    """Return operator -> its schema, read out of the installed vLLM's library."""
    spec = importlib.util.find_spec("vllm")
    library = Path(spec.origin).parent / f"{LIBRARIES[namespace]}_stable_libtorch.abi3.so"
    with library.open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = {}
        for name in names:
            pattern = rb"\x00(" + re.escape(name.encode()) + rb"\([^\x00]*\) -> [^\x00]*)\x00"
            (found[name],) = {match.decode() for match in re.findall(pattern, text)}
    return found


def aligned(x: Tensor, length: int, vector_bytes: int) -> None:
    width = math.gcd(vector_bytes // x.element_size(), length)
    for start in (x.data_ptr() // x.element_size(), *x.stride()[:-1]):
        assert start % width == 0, "misaligned address"


def act_and_mul(act, out: Tensor, x: Tensor) -> None:
    d = x.shape[-1] // 2
    tokens = x.numel() // x.shape[-1]
    if tokens == 0:
        return
    aligned(x.as_strided((2 * d,), (1,)), d, 32)
    gate, up = x.as_strided((tokens, 2, d), (2 * d, d, 1)).float().unbind(1)
    result = (act(gate).to(x.dtype).float() * up).to(x.dtype)
    out.as_strided((tokens, d), (d, 1)).copy_(result)


def silu_and_mul(result: Tensor, input: Tensor) -> None:
    act_and_mul(functional.silu, result, input)


def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    act_and_mul(functional.gelu, out, input)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    act_and_mul(lambda x: functional.gelu(x, approximate="tanh"), out, input)


def scaled(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    unit = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return unit if weight is None else unit * weight.float()


def rms_norm(result: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    assert result.is_contiguous()
    assert 2 <= input.dim() <= 4
    assert input.numel(), "a launch with an empty grid"
    hidden = input.shape[-1]
    if weight is not None:
        assert weight.is_contiguous()
        assert weight.dtype == input.dtype
        aligned(weight, hidden, 16)
    aligned(input, hidden, 16)
    rows = input.as_strided(input.shape, (*input.stride()[:-1], 1))
    result.copy_(scaled(rows, weight, epsilon))


def fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float
) -> None:
    assert input.dtype == residual.dtype
    assert residual.is_contiguous()
    if weight is not None:
        assert weight.is_contiguous()
        assert weight.dtype == input.dtype
    assert input.numel(), "a launch with an empty grid"
    hidden = input.shape[-1]
    tokens = input.numel() // hidden
    rows = input.as_strided((tokens, hidden), (input.stride(-2), 1))
    total = residual.view(tokens, hidden)
    total.copy_((rows.float() + total.float()).to(total.dtype))
    rows.copy_(scaled(total, weight, epsilon))


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    assert positions.dtype == torch.int64
    tokens = positions.numel()
    assert tokens, "a division by zero"
    half = cos_sin_cache.shape[1] // 2
    assert 2 * half <= head_size
    heads = query.numel() // tokens // head_size
    head_stride = query.stride(-2) if query.dim() == positions.dim() + 2 else head_size
    cache = cos_sin_cache.as_strided((cos_sin_cache.shape[0], 2 * half), (2 * half, 1))
    rows = positions.as_strided((tokens,), (1,))
    cos, sin = cache[rows].float().unsqueeze(1).split(half, dim=-1)
    pair = torch.arange(half)
    one, two = (pair, pair + half) if is_neox else (2 * pair, 2 * pair + 1)
    for x in (query, key):
        if x is None:
            continue
        count = x.numel() // tokens // head_size
        assert heads % count == 0
        assert x.dtype == query.dtype
        values = x.as_strided((tokens, count, head_size), (x.stride(0), head_stride, 1))
        a, b = values[..., one].float(), values[..., two].float()
        values[..., one] = (a * cos - b * sin).to(x.dtype)
        values[..., two] = (b * cos + a * sin).to(x.dtype)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    assert kv_cache_dtype == "auto"
    assert k_scale.dtype == v_scale.dtype == torch.float32
    assert k_scale.tolist() == v_scale.tolist() == [1.0]
    assert key_cache.stride(0) == value_cache.stride(0)
    tokens = slot_mapping.shape[0]
    assert tokens, "a launch with an empty grid"
    _, heads, size = key.shape
    blocks, block_size = key_cache.shape[:2]
    strides = (*key_cache.stride()[:3], 1)
    written = (slot_mapping.as_strided((tokens,), (1,)) >= 0).nonzero().flatten()
    slots = slot_mapping[written]
    place = (slots // block_size, slots % block_size)
    for new, cache in ((key, key_cache), (value, value_cache)):
        aligned(new, size, 16)
        aligned(cache, size, 16)
        rows = new.as_strided((tokens, heads, size), (new.stride(0), size, 1))
        cache.as_strided((blocks, block_size, heads, size), strides)[place] = rows[written]


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool,
    bias: Tensor | None = None,
    is_padding: Tensor | None = None,
) -> None:
    assert bias is None
    assert is_padding is None
    tokens, experts = gating_output.shape
    k = topk_weights.shape[1]
    assert tokens, "a launch with an empty grid"
    assert gating_output.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert topk_weights.dtype == torch.float32
    assert topk_indices.dtype in (torch.int32, torch.int64)
    assert token_expert_indices.dtype == torch.int32
    for x in (topk_weights, topk_indices, token_expert_indices):
        assert x.is_contiguous()
    aligned(gating_output.as_strided((1, experts), (experts, 1)), experts, 16)
    rows = gating_output.as_strided((tokens, experts), (experts, 1)).float().softmax(-1)
    weights, indices = rows.sort(dim=-1, descending=True, stable=True)
    weights, indices = weights[:, :k], indices[:, :k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_indices.copy_(indices)
    token_expert_indices.copy_(torch.arange(k) * tokens + torch.arange(tokens)[:, None])


def grouped_topk(
    scores: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor,
    scoring_func: int,
) -> tuple[Tensor, Tensor]:
    tokens, experts = scores.shape
    assert tokens, "a launch with an empty grid"
    assert experts % n_group == 0
    assert n_group <= 32
    assert topk <= min(32, topk_group * experts // n_group)
    plain = scores.as_strided((tokens, experts), (experts, 1)).float()
    plain = plain.sigmoid() if scoring_func == 1 else plain
    chosen_by = plain + bias.as_strided((experts,), (1,)).float()
    groups = chosen_by.unflatten(1, (n_group, -1))
    ranks = groups.topk(2, dim=-1)[0].sum(-1).sort(dim=-1, descending=True, stable=True)[1]
    allowed = torch.full_like(groups, -torch.inf)
    kept = ranks[:, :topk_group, None].expand(-1, -1, groups.shape[2])
    allowed = allowed.scatter(1, kept, groups.gather(1, kept)).flatten(1)
    indices = allowed.sort(dim=-1, descending=True, stable=True)[1][:, :topk]
    weights = plain.gather(1, indices)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor, indices.int()


def moe_align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Tensor,
    experts_ids: Tensor,
    num_tokens_post_pad: Tensor,
    maybe_expert_map: Tensor | None,
    scatter_idx: Tensor | None = None,
) -> None:
    assert (num_experts + 31) // 32 * 32 < 1024
    assert topk_ids.numel(), "a launch with an empty grid"
    ids = topk_ids.as_strided((topk_ids.numel(),), (1,)).tolist()
    assert min(ids) >= 0, "an address before the counters"
    members: dict[int, list[int]] = {}
    for position, expert in enumerate(ids):
        if expert < num_experts:
            own = expert if maybe_expert_map is None else int(maybe_expert_map[expert])
            if own >= 0:
                members.setdefault(own, []).append(position)
    sorted_token_ids.fill_(len(ids))
    experts_ids.fill_(0)  # which the kernel writes where there is no block
    end = 0
    for expert, positions in sorted(members.items()):
        sorted_token_ids[end : end + len(positions)] = torch.tensor(positions)
        blocks = -(-len(positions) // block_size)
        experts_ids[end // block_size : end // block_size + blocks] = expert
        end += blocks * block_size
    num_tokens_post_pad.fill_(end)


def moe_sum(
    input: Tensor, output: Tensor, topk_ids: Tensor | None = None, expert_map: Tensor | None = None
) -> None:
    assert topk_ids is None
    assert expert_map is None
    tokens, k, width = input.shape
    assert tokens, "a launch with an empty grid"
    for x in (input, output):
        aligned(x.as_strided((1, width), (width, 1)), width, 16)
    rows = input.as_strided(input.shape, (k * width, width, 1)).float()
    output.as_strided(output.shape, (width, 1)).copy_(rows.sum(1))


def fused_experts(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Stand in for vLLM's ``fused_experts_impl``, which launches Triton kernels."""
    signature = inspect.signature(original)

    def computed(*arguments: Any, **keywords: Any) -> Tensor:
        given = signature.bind(*arguments, **keywords)
        given.apply_defaults()
        call = given.arguments
        x, ids = call["hidden_states"], call["topk_ids"]
        weights, expert_map = call["topk_weights"], call["expert_map"]
        assert x.numel(), "a launch with an empty grid"
        for tensor in (x, ids, weights):
            assert tensor.is_contiguous()
        experts = call["global_num_experts"]
        assert 0 <= int(ids.min()) <= int(ids.max()) < experts, "a choice that nothing computes"
        local = ids.long() if expert_map is None else expert_map[ids.long()].long()
        act = {"silu": functional.silu, "gelu": functional.gelu}[call["activation"]]
        result = torch.zeros_like(x, dtype=torch.float32)
        for token, choice in itertools.product(range(len(x)), range(ids.shape[1])):
            expert, weight = int(local[token, choice]), float(weights[token, choice])
            if expert < 0:
                continue
            on_input = call["apply_router_weight_on_input"]
            both = call["w1"][expert].float() @ x[token].float() * (weight if on_input else 1.0)
            gate, up = both.to(x.dtype).chunk(2)
            inner = (act(gate.float()).to(x.dtype) * up).float()
            out = call["w2"][expert].float() @ inner * (1.0 if on_input else weight)
            result[token] += out.to(x.dtype)
        return result.to(x.dtype)

    return computed


MOE_KERNELS = {
    function.__name__: function
    for function in (topk_softmax, grouped_topk, moe_align_block_size, moe_sum)
}
KERNELS = {
    function.__name__: function
    for function in (
        silu_and_mul, gelu_and_mul, gelu_tanh_and_mul, rms_norm, fused_add_rms_norm,
        rotary_embedding,
    )
}  # fmt: skip
CACHE_KERNELS = {reshape_and_cache_flash.__name__: reshape_and_cache_flash}


_libraries: list[torch.library.Library] = []  # the operators live as long as these


def declare(kernel: Callable[..., object], *names: str, key: str, namespace: str = "_C") -> None:
    """Declare operators of vLLM's library, computed by ``kernel``, for torch's dispatch ``key``."""
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)
    for name, schema in schemas(list(names), namespace).items():
        library.define(schema)
        library.impl(name, kernel, key)


def install(patch: pytest.MonkeyPatch) -> None:
    """Declare the operators, and let the backend take tensors on the CPU."""
    if not _libraries:
        for name, kernel in KERNELS.items():
            declare(kernel, name, key="CPU")
        for name, kernel in CACHE_KERNELS.items():
            declare(kernel, name, key="CPU", namespace="_C_cache_ops")
        for name, kernel in MOE_KERNELS.items():
            declare(kernel, name, key="CPU", namespace="_moe_C")

    from vllm_fl.dispatch.types import YES
    from vllm_fl_cuda import backend, layout, nvml

    patch.setattr(nvml, "detect", lambda: YES)
    patch.setattr(backend, "may_run_on", lambda name: YES)
    patch.setattr(layout, "DEVICE", "cpu")


def emulate_experts(patch: pytest.MonkeyPatch) -> None:
    """Put :func:`fused_experts` in place; this imports vLLM's layers."""
    from vllm.model_executor.layers.fused_moe import fused_moe

    patch.setattr(fused_moe, "fused_experts_impl", fused_experts(fused_moe.fused_experts_impl))


def pytest_configure() -> None:
    """Install, when pytest loads this as a plug-in."""
    install(pytest.MonkeyPatch())
    emulate_experts(pytest.MonkeyPatch())


def register_builtins(registry: object) -> None:
    """Install, when vllm-fl loads this as a plug-in."""
    install(pytest.MonkeyPatch())
