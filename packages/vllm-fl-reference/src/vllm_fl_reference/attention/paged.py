"""The mathematics of attention over a paged cache; torch only.

A cache has the logical shape ``[blocks, kv_heads, block_size, key_size + value_size]`` with any
strides. Token-major memory (``block_size`` outside ``kv_heads``) is gathered fastest.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_fl_reference.attention.planning import CacheSlots, Tile

# fp16 is left out: torch's fused attention is several times slower than fp32 products on CPUs.
_FUSED_DTYPES = (torch.float32, torch.bfloat16)


def write_kv_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slots: CacheSlots) -> None:
    """Store new keys and values in their slots; every other byte of the cache stays as it is.

    Args:
        key: ``[tokens, kv_heads, key_size]``; rows past ``slots.num_rows`` are padding.
        value: ``[tokens, kv_heads, value_size]``.
        kv_cache: ``[blocks, kv_heads, block_size, key_size + value_size]``, **modified**. Values
            are rounded to its dtype.
        slots: From `plan_cache_write`.

    Raises:
        ValueError: The cache's last dimension does not hold a key and a value.
    """
    _check_cache("write_kv_cache", key.shape[2], value.shape[2], kv_cache)
    rows = torch.cat((key[: slots.num_rows], value[: slots.num_rows]), dim=-1)
    if slots.rows is not None:
        rows = rows.index_select(0, slots.rows)
    kv_cache.transpose(1, 2).index_put_((slots.blocks, slots.offsets), rows.to(kv_cache.dtype))


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    tiles: tuple[Tile, ...],
    scale: float,
    output: Tensor,
    *,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> None:
    """Attend from each query token to the cached keys that the plan lets it see.

    ``softmax(cap(scale * q k^T) + alibi) v`` in fp32 with one rounding at the end, where
    ``cap(s) = soft_cap * tanh(s / soft_cap)``. A sink is one more logit per query head (neither
    scaled nor capped) that takes part in the softmax and carries no value. Without cap, sinks and
    ALiBi torch's `scaled_dot_product_attention` is used for fp32 and bf16.

    Args:
        query: ``[tokens, query_heads, key_size]``, any strides.
        kv_cache: ``[blocks, kv_heads, block_size, key_size + value_size]``, any strides;
            ``query_heads`` is a multiple of ``kv_heads``. Content that the plan hides may be NaN.
        tiles: From `plan_attention`.
        scale: Factor on the scores.
        output: ``[tokens, query_heads, value_size]``, **modified** in the rows the tiles cover.
        soft_cap: Bound of the scores, or None.
        sinks: ``[query_heads]``, or None.
        alibi_slopes: ``[query_heads]``, added as ``-slope * |query - key position|``, or None.

    Raises:
        ValueError: Head counts or sizes do not fit together.
    """
    _check_cache("paged_attention", query.shape[2], output.shape[2], kv_cache)
    if query.shape[1] % kv_cache.shape[1]:
        raise ValueError(
            f"paged_attention: {query.shape[1]} query heads are not a multiple of "
            f"{kv_cache.shape[1]} kv heads"
        )
    plain = soft_cap is None and sinks is None and alibi_slopes is None
    fused = plain and query.dtype in _FUSED_DTYPES
    for tile in tiles:
        q = query.index_select(0, tile.query_rows).view(*tile.shape[:2], *query.shape[1:])
        k, v = _gather(kv_cache, tile, query.shape[2], query.dtype)
        if fused:
            out = _fused(q, k, v, tile, scale)
        else:
            out = _explicit(q, k, v, tile, scale, soft_cap, sinks, alibi_slopes)
        rows = out.to(output.dtype).flatten(0, 1)
        if tile.kept is not None:
            rows = rows.index_select(0, tile.kept)
        output.index_copy_(0, tile.output_rows, rows)


def _check_cache(op: str, key_size: int, value_size: int, kv_cache: Tensor) -> None:
    if kv_cache.dim() != 4 or kv_cache.shape[3] != key_size + value_size:
        raise ValueError(
            f"{op}: the cache must be [blocks, kv_heads, block_size, {key_size} + {value_size}], "
            f"got {tuple(kv_cache.shape)}"
        )


def _gather(
    kv_cache: Tensor, tile: Tile, key_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the tile's keys and values, ``[R, kv_heads, keys, size]`` views of one copy."""
    kv = kv_cache.transpose(1, 2).index_select(0, tile.blocks).flatten(0, 1)
    # Weights of hidden keys are zero, but zero times NaN is NaN.
    kv.index_fill_(0, tile.hidden_keys, 0)
    kv = kv.to(dtype).view(tile.shape[0], -1, *kv.shape[1:]).transpose(1, 2)
    return kv[..., :key_size], kv[..., key_size:]


def _fused(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> Tensor:
    mask = tile.mask[:, None]
    if q.shape[1] == 1:
        # Decode: the query heads of one kv head are the rows of one product.
        grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[3])
        out = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        return out.reshape(q.shape[0], 1, q.shape[2], v.shape[3])
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[2] != k.shape[1]
    )
    return out.transpose(1, 2)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: Tile,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    rows, queries, heads, size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    # [R, kv_heads, group * T, size]: the query heads of one kv head share its keys.
    grouped = q.to(torch.float32).view(rows, queries, kv_heads, group, size)
    q32 = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)
    k32 = k.to(torch.float32, memory_format=torch.contiguous_format)
    v32 = v.to(torch.float32, memory_format=torch.contiguous_format)
    scores = torch.matmul(q32, k32.transpose(2, 3)).mul_(scale)
    scores = scores.view(rows, kv_heads, group, queries, -1)
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if alibi_slopes is not None:
        distance = tile.query_positions[:, :, None] - tile.key_positions[:, None, :]
        slopes = alibi_slopes.to(torch.float32).view(1, kv_heads, group, 1, 1)
        scores.sub_(slopes * distance.abs()[:, None, None])
    scores.masked_fill_(~tile.mask[:, None, None], -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        # A sink far above the scores overflows to inf, which leaves the weights the zero they are.
        sink = sinks.to(torch.float32).view(1, kv_heads, group, 1, 1)
        total += (sink - top).exp()
    out = torch.matmul(weights.div_(total).flatten(2, 3), v32)
    return out.view(rows, heads, queries, -1).transpose(1, 2)
