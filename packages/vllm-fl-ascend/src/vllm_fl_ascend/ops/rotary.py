"""Rotary position embedding."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from vllm_fl.integration.rotary_cache import are_halves_of_one_cache, joint_cache
from vllm_fl_ascend.device import is_elsewhere

_STYLES = {True: "half", False: "interleave"}  # is_neox_style -> rotary_mode
_PLAIN = [0, 0, 0]  # mrope_section of an embedding with one position a token
_UNITS = {torch.float32: 16, torch.float16: 32, torch.bfloat16: 32}  # divide rotary_dim


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    is_neox_style: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rotate query and key into new tensors, by ``npu_mrope`` with one position a token.

    It rotates the first ``rotary_dim`` channels of each head and passes on the rest. It is used
    rather than the in-place ``_npu_rotary_embedding``, which needs the library ATB and reports its
    errors asynchronously, and ``npu_apply_rotary_pos_emb``, which rotates whole heads of 64 or
    128 channels alone.
    """
    if key is None:
        raise ValueError("npu_mrope rotates a query and a key; there is no key")
    rotated, rotated_key = torch_npu.npu_mrope(
        position_ids,
        _heads_in_rows(query),
        _heads_in_rows(key),
        joint_cache(cos),
        query.shape[-1],
        mrope_section=_PLAIN,
        rotary_mode=_STYLES[is_neox_style],
    )
    return rotated.view(query.shape), rotated_key.view(key.shape)


def _heads_in_rows(x: Tensor) -> Tensor:
    """Return ``x`` [T, H, D] as a contiguous [T, H * D]."""
    return x.reshape(x.shape[0], -1).contiguous()


def rotary_embedding_supports(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    is_neox_style: bool,
) -> bool | str:
    """Whether ``npu_mrope`` takes the arguments.

    Documented: rotary_dim a multiple of 32, in fp32 of 16. Kept besides: everything of one dtype,
    heads of one size, and a cache that need not be put together first.
    """
    if is_elsewhere(query, key, cos, position_ids):
        return "query, key, cache or positions are not on an NPU"
    if key is None:
        return "npu_mrope rotates a query and a key; there is no key"
    if query.dim() != 3 or key.dim() != 3:
        return f"query and key have {query.dim()} and {key.dim()} dimensions, not 3"
    if query.shape[0] == 0:
        return "there are no tokens"
    if key.dtype != query.dtype or key.shape[2] != query.shape[2]:
        return "the key differs from the query in dtype or head size"
    if cos.dtype != query.dtype:
        return f"the query is {query.dtype} and the cache {cos.dtype}"
    rotary_dim, unit = 2 * cos.shape[1], _UNITS[query.dtype]
    if rotary_dim % unit or rotary_dim > query.shape[2]:
        return (
            f"rotary_dim {rotary_dim} is not a multiple of {unit} up to the head size "
            f"{query.shape[2]}"
        )
    if not are_halves_of_one_cache(cos, sin):
        return "cos and sin are not the two halves of one cache"
    return True
