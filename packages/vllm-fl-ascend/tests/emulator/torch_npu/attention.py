"""Fused attention for inference: ``npu_fused_infer_attention_score``.

Emulated are the layouts TND (tokens of all requests, one after the other) and BSH with one query a
request, over keys and values that are packed or lie in a paged cache.

docs, as far as it concerns these:

- query, key and value fp16 or bf16, contiguous; num_heads a multiple of num_key_value_heads, the
  ratio at most 64.
- TND: actual_seq_lengths are cumulative and must be given; at most 65536 tokens.
- Key and value packed: actual_seq_lengths_kv are cumulative. In a paged cache
  [blocks, block_size, heads * size]: the length of each request; block_table int32 [B, >= blocks
  of the longest request]; at most 65535 elements a token and 2^31 - 1 in all.
- block_size: multiples of 128 up to 512; with one query a request multiples of 16 up to 512.
- One query a request: sparse_mode, pre_tokens and next_tokens have no effect; an atten_mask
  [B, 1, 1, keys] hides where it is 1, and with a paged cache keys are all slots of the block
  table.
- More queries: sparse_mode 0 without mask hides nothing; 2, 3 and 4 need the mask 2048 x 2048
  that is 1 above the diagonal, and hide what lies right of the diagonal that starts at the upper
  left (2), ends at the lower right (3), or outside the band of pre_tokens before and next_tokens
  after that diagonal (4). TND has no other masks. In mode 3 a request has at most as many queries
  as keys.

vllm-ascend (``attention_v1.py``, ``mla_v1.py``): TND runs heads of 64, 128 and 192 channels, and
with a paged cache and no mask, which is decoding, at most 16 queries a request.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from torch_npu.library import kernel, require

NAME = "npu_fused_infer_attention_score"
HEAD_SIZES = (64, 128, 192)
COMPRESSED = 2048
INT_MAX = 2147483647
DECODE_QUERIES = 16
# Parameters that are not emulated -> their defaults.
DEFAULTS = {
    "inner_precise": 0, "antiquant_mode": 0, "key_antiquant_mode": 0, "value_antiquant_mode": 0,
    "softmax_lse_flag": False,
}  # fmt: skip


def _fake(query, key, value, **how):
    return torch.empty_like(query), query.new_empty((1,), dtype=torch.float32)


@kernel(_fake)
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = INT_MAX,
    next_tokens: int = INT_MAX,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    **rest: object,
) -> tuple[Tensor, Tensor]:
    """See the module."""
    for name, given in rest.items():
        require(given == DEFAULTS.get(name), f"{NAME}: {name}={given!r} is not emulated")
    kv_heads = num_key_value_heads or num_heads
    require(num_heads % kv_heads == 0, f"{NAME}: {num_heads} heads, {kv_heads} kv heads")
    require(num_heads // kv_heads <= 64, f"{NAME}: {num_heads // kv_heads} heads a kv head")
    for x in (query, key, value):
        require(x.dtype in (torch.float16, torch.bfloat16), f"{NAME}: {x.dtype}")
        require(x.dtype == query.dtype and x.is_contiguous(), f"{NAME}: dtypes or strides")
    require(key.shape == value.shape, f"{NAME}: {key.shape} and {value.shape}")
    queries, ends = _queries(query, input_layout, num_heads, actual_seq_lengths)
    size = queries.shape[2]
    counts = [last - first for first, last in pairwise([0, *ends])]
    longest = max(counts, default=0)
    kv_lengths = actual_seq_lengths_kv
    require(kv_lengths is not None, f"{NAME}: actual_seq_lengths_kv is missing")
    if block_table is None:
        require(input_layout == "TND", f"{NAME}: packed keys are emulated in TND alone")
        require(key.shape[1:] == (kv_heads, size), f"{NAME}: keys {key.shape}")
        keys, values = _packed(key, value, kv_lengths, len(counts))
    else:
        require(block_size == key.shape[1], f"{NAME}: block_size={block_size}, {key.shape}")
        _check_paged(key, kv_heads * size, kv_lengths, block_table, len(counts), longest)
        keys = [
            _gather(key, table, n).view(n, kv_heads, size)
            for table, n in zip(block_table, kv_lengths, strict=True)
        ]
        values = [
            _gather(value, table, n).view(n, kv_heads, size)
            for table, n in zip(block_table, kv_lengths, strict=True)
        ]
    if longest > 1 and sparse_mode in (2, 3, 4):
        _check_compressed(atten_mask, sparse_mode)
    out = torch.empty_like(queries)
    for request, (first, count) in enumerate(zip([0, *ends], counts, strict=False)):
        hidden = _hidden(
            count, len(keys[request]), longest, request, atten_mask, sparse_mode,
            pre_tokens, next_tokens, input_layout, block_table, block_size,
        )  # fmt: skip
        rows = slice(first, first + count)
        out[rows] = _attend(queries[rows], keys[request], values[request], scale, hidden)
    return out.view(query.shape), torch.zeros(1)


def _queries(
    query: Tensor, layout: str, heads: int, lengths: list[int] | None
) -> tuple[Tensor, list[int]]:
    """Return the queries [T, heads, size] and the end of each request."""
    require(layout in ("TND", "BSH"), f"{NAME}: input_layout={layout!r} is not emulated")
    require(query.dim() == 3, f"{NAME}: query {query.shape}")
    if layout == "BSH":
        require(query.shape[1] == 1, f"{NAME}: BSH is emulated with one query a request")
        require(query.shape[2] % heads == 0, f"{NAME}: {heads} heads of {query.shape[2]} channels")
        size = query.shape[2] // heads
        require(size % 16 == 0 and size <= 512, f"{NAME}: heads of {size} channels")
        return query.view(len(query), heads, size), list(range(1, len(query) + 1))
    require(lengths is not None, f"{NAME}: actual_seq_lengths is missing")
    require(query.shape[1] == heads, f"{NAME}: num_heads={heads}, query {query.shape}")
    require(query.shape[2] in HEAD_SIZES, f"{NAME}: heads of {query.shape[2]} channels")
    require(len(query) <= 65536, f"{NAME}: {len(query)} tokens")
    _check_cumulative("actual_seq_lengths", lengths, len(query))
    return query, lengths


def _check_cumulative(name: str, lengths: list[int], total: int) -> None:
    ascending = all(a <= b for a, b in pairwise([0, *lengths]))
    require(ascending and lengths[-1] == total, f"{NAME}: {name} {lengths} of {total} tokens")


def _packed(
    key: Tensor, value: Tensor, ends: list[int], requests: int
) -> tuple[list[Tensor], list[Tensor]]:
    require(len(ends) == requests, f"{NAME}: {len(ends)} kv lengths, {requests} requests")
    _check_cumulative("actual_seq_lengths_kv", ends, len(key))
    parts = [slice(a, b) for a, b in pairwise([0, *ends])]
    return [key[p] for p in parts], [value[p] for p in parts]


def _check_paged(
    cache: Tensor, width: int, lengths: list[int], table: Tensor, requests: int, longest: int
) -> None:
    blocks, size, columns = cache.shape
    require(columns == width, f"{NAME}: the cache has {columns} channels, not {width}")
    require(width <= 65535, f"{NAME}: {width} elements a token")
    require(cache.numel() <= INT_MAX, f"{NAME}: a cache of {cache.numel()} elements")
    unit = 16 if longest == 1 else 128
    require(size % unit == 0 and size <= 512, f"{NAME}: blocks of {size} tokens")
    require(table.dim() == 2 and table.dtype == torch.int32, f"{NAME}: block_table")
    require(table.is_contiguous(), f"{NAME}: block_table is not contiguous")
    require(len(table) == len(lengths) == requests, f"{NAME}: rows of the block table")
    for row, n in zip(table, lengths, strict=True):
        needed = -(-n // size)
        require(n >= 0 and needed <= len(row), f"{NAME}: {n} keys in {len(row)} blocks")
        used = row[:needed]
        require(bool(((used >= 0) & (used < blocks)).all()), f"{NAME}: a block number")


def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    needed = -(-length // cache.shape[1])
    return cache[table[:needed].long()].flatten(0, 1)[:length]


@lru_cache
def _above_the_diagonal() -> Tensor:
    return torch.ones((COMPRESSED, COMPRESSED), dtype=torch.int8).triu(1)


def _check_compressed(mask: Tensor | None, mode: int) -> None:
    expected = _above_the_diagonal()
    right = mask is not None and mask.shape[-2:] == expected.shape and mask.dim() <= 4
    require(right, f"{NAME}: sparse_mode {mode} needs the mask {COMPRESSED} x {COMPRESSED}")
    same = torch.equal(mask.view(expected.shape).to(torch.int8), expected)
    require(same, f"{NAME}: the mask is not 1 above the diagonal and 0 elsewhere")


def _hidden(
    queries: int,
    keys: int,
    longest: int,
    request: int,
    mask: Tensor | None,
    mode: int,
    pre: int,
    after: int,
    layout: str,
    block_table: Tensor | None,
    block_size: int,
) -> Tensor:
    """Return [queries, keys], True where a key is hidden."""
    nothing = torch.zeros((queries, keys), dtype=torch.bool)
    if mask is not None:
        require(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"{NAME}: mask {mask.dtype}")
        require(mask.is_contiguous(), f"{NAME}: the mask is not contiguous")
    if longest <= 1:
        if mask is None or mode in (2, 3, 4):
            return nothing
        require(layout != "TND", f"{NAME}: TND with a mask of its own")
        slots = keys if block_table is None else block_table.shape[1] * block_size
        require(mask.dim() == 4 and mask.shape[1:3] == (1, 1), f"{NAME}: mask {mask.shape}")
        require(mask.shape[3] >= slots, f"{NAME}: mask {mask.shape} of {slots} keys")
        return mask[request, 0, :, :keys].bool()
    require(mode in (0, 2, 3, 4), f"{NAME}: sparse_mode={mode} is not emulated")
    if mode == 0:
        require(mask is None, f"{NAME}: TND with a mask of its own")
        if block_table is not None:
            require(longest <= DECODE_QUERIES, f"{NAME}: decoding with {longest} queries")
        return nothing
    distance = torch.arange(keys) - torch.arange(queries)[:, None]  # key after query
    if mode == 2:
        return distance > 0
    distance = distance - (keys - queries)
    if mode == 3:
        require(queries <= keys, f"{NAME}: {queries} queries and {keys} keys")
        return distance > 0
    return (distance > after) | (distance < -pre)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor) -> Tensor:
    """softmax(scale * q k^T) v in fp32, rounded once; zeros for a query that sees nothing."""
    group = query.shape[1] // max(key.shape[1], 1)
    k = key.float().repeat_interleave(group, dim=1)
    v = value.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), k) * scale
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1).nan_to_num()
    # The kernel skips hidden keys, so that what lies there does not matter.
    v = v.masked_fill(hidden.all(dim=0)[:, None, None], 0)
    return torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)
