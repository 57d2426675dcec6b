"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    is_neox_style: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rotate pairs of query and key channels by an angle that depends on the position.

    With ``r = 2 * cos.shape[-1]`` the first ``r`` channels of each head are rotated and the rest
    pass through bit-unchanged. Neox style pairs channel ``i`` with ``i + r / 2``; otherwise
    (GPT-J style) ``2 * i`` with ``2 * i + 1``.

    Rounding order, that of vLLM's ``ApplyRotaryEmb.forward_static``: cos and sin are rounded to
    the input's dtype, and each product and each sum is rounded to that dtype.

    Args:
        query: ``[tokens, query_heads, head_size]``, any floating dtype and strides; not modified.
        key: ``[tokens, key_heads, head_size]``, or None; not modified. Its head size may differ
            from the query's.
        cos: ``[max_position, r / 2]``.
        sin: Same shape as ``cos``.
        position_ids: ``[tokens]``, integers in ``[0, max_position)``.
        is_neox_style: Which channels form a pair, see above.

    Returns:
        ``(query, key)`` as new tensors, ``key`` being None when it was None.

    Raises:
        ValueError: Shapes do not fit together, ``r`` is zero or larger than a head, or
            ``position_ids`` are not integers.
    """
    _check_tables(cos, sin, position_ids)
    _check_heads("query", query, cos, position_ids)
    rows = position_ids.to(torch.int64)
    cos, sin = cos.index_select(0, rows).unsqueeze(1), sin.index_select(0, rows).unsqueeze(1)
    if key is None:
        return _rotate(query, cos, sin, is_neox_style), None
    _check_heads("key", key, cos, position_ids)
    return _rotate(query, cos, sin, is_neox_style), _rotate(key, cos, sin, is_neox_style)


def _check_tables(cos: Tensor, sin: Tensor, position_ids: Tensor) -> None:
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[1] == 0:
        raise ValueError(
            "rotary_embedding: cos and sin must both be [max_position, rotary_dim / 2], "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    is_integer = not (position_ids.is_floating_point() or position_ids.dtype == torch.bool)
    if position_ids.dim() != 1 or not is_integer:
        raise ValueError(
            "rotary_embedding: position_ids must be a vector of integers, "
            f"got shape {tuple(position_ids.shape)} of {position_ids.dtype}"
        )


def _check_heads(name: str, x: Tensor, cos: Tensor, position_ids: Tensor) -> None:
    if x.dim() != 3 or x.shape[0] != position_ids.shape[0]:
        raise ValueError(
            f"rotary_embedding: {name} must be [{position_ids.shape[0]} tokens, heads, head_size], "
            f"got {tuple(x.shape)}"
        )
    if 2 * cos.shape[-1] > x.shape[2]:
        raise ValueError(
            f"rotary_embedding: rotary_dim {2 * cos.shape[-1]} is larger than {name}'s "
            f"head size {x.shape[2]}"
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    rotated, tail = x[..., : 2 * half], x[..., 2 * half :]
    if is_neox_style:
        first, second = rotated[..., :half], rotated[..., half:]
    else:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    new_first = first * cos - second * sin
    new_second = second * cos + first * sin
    if is_neox_style:
        return torch.cat((new_first, new_second, tail), dim=-1)
    pairs = torch.stack((new_first, new_second), dim=-1).flatten(-2)
    return torch.cat((pairs, tail), dim=-1)
