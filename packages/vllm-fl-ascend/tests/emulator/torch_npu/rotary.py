"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.library import kernel, require, require_floats


def _fake(
    positions, query, key, cos_sin_cache, head_size, mrope_section=None,
    rotary_mode="half", cache_mode="default",
):  # fmt: skip
    return torch.empty_like(query), torch.empty_like(key)


@kernel(_fake)
def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    """Rotate the first rotary_dim channels of every head; the cache holds cos, then sin.

    docs: positions [T] int32 or int64 (one a token), query and key [T, heads * head_size], cache
    [positions, rotary_dim], mrope_section [0, 0, 0] for one position a token; rotary_mode "half"
    or "interleave"; rotary_dim a multiple of 32 in 16 bits and of 16 in fp32.
    aclnnRopeWithSinCosCache: channels past rotary_dim pass through; positions out of range fail.
    """
    require_floats("npu_mrope", query, key, cos_sin_cache)
    require(positions.dtype in (torch.int32, torch.int64), "npu_mrope: positions' dtype")
    require(positions.dim() == 1, "npu_mrope: only one position a token is emulated")
    require(mrope_section == [0, 0, 0], f"npu_mrope: mrope_section={mrope_section}")
    require(rotary_mode in ("half", "interleave"), f"npu_mrope: rotary_mode={rotary_mode!r}")
    require(cache_mode == "default", f"npu_mrope: cache_mode={cache_mode!r} is not emulated")
    for x in (query, key, cos_sin_cache):
        require(x.dim() == 2, "npu_mrope: query, key and cache have 2 dimensions")
    tokens, rotary = positions.shape[0], cos_sin_cache.shape[1]
    unit = 16 if query.dtype == torch.float32 else 32
    require(rotary % unit == 0, f"npu_mrope: rotary_dim {rotary} is no multiple of {unit}")
    require(rotary <= head_size, f"npu_mrope: rotary_dim {rotary}, head_size {head_size}")
    if tokens:
        low, high = positions.aminmax()
        require(bool(low >= 0) and bool(high < len(cos_sin_cache)), "npu_mrope: a position")
    cos, sin = cos_sin_cache[positions.long()].float().unsqueeze(1).chunk(2, dim=-1)
    results = []
    for x in (query, key):
        require(x.shape[0] == tokens and x.shape[1] % head_size == 0, "npu_mrope: shapes")
        heads = x.reshape(tokens, -1, head_size).clone(memory_format=torch.contiguous_format)
        part = heads[..., :rotary].float()
        if rotary_mode == "half":
            a, b = part.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = part[..., ::2], part[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        heads[..., :rotary] = turned.to(x.dtype)
        results.append(heads.view(x.shape))
    return results[0], results[1]
