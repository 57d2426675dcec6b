"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl.integration.rotary_cache import are_halves_of_one_cache, joint_cache
from vllm_fl_cuda.layout import is_elsewhere


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    is_neox_style: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rotate query and key in place, by ``_C::rotary_embedding``.

    The kernel reads one cache ``[max_position, cos | sin]``.
    """
    torch.ops._C.rotary_embedding(
        position_ids, query, key, query.shape[-1], joint_cache(cos), is_neox_style
    )
    return query, key


def rotary_embedding_supports(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    is_neox_style: bool,
) -> bool | str:
    """Whether the kernel takes the arguments.

    It computes every head's address from the query's stride between heads, also in the key.
    """
    if is_elsewhere(query):
        return "the query is not on a CUDA device"
    if not are_halves_of_one_cache(cos, sin):
        return "cos and sin are not the two halves of one cache"
    if position_ids.dtype != torch.int64 or not position_ids.is_contiguous():
        return "the positions are not contiguous int64"
    if position_ids.shape[0] == 0:
        return "there are no tokens"
    if query.stride(2) != 1 or 2 * cos.shape[1] > query.shape[2]:
        return "the query's heads are not contiguous, or smaller than what is rotated"
    if key is None:
        return True
    if key.dtype != query.dtype or key.shape[2] != query.shape[2] or key.stride(2) != 1:
        return "the key differs from the query in dtype or head size, or is not contiguous"
    if key.shape[1] > 1 and key.stride(1) != query.stride(1):
        return "query and key differ in the stride between heads"
    if query.shape[1] % key.shape[1] != 0:
        return f"{query.shape[1]} query heads are no multiple of {key.shape[1]} key heads"
    return True
