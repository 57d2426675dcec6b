"""Which kernels a step needs, and the call that runs them; torch and Triton only.

A step may mix requests of one query token with requests of thousands. Requests with few query
tokens are given to the kernel that splits the keys, those with many to the one that does not;
each kernel finds the lengths on the device and passes over the requests that are not its own.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vllm_fl_flaggems.kernels.attention_decode import decode, variant_of
from vllm_fl_flaggems.kernels.attention_prefill import prefill
from vllm_fl_flaggems.tiles import DecodeTile, decode_tile, prefill_tile

ANY_LENGTH = (1, sys.maxsize)
"""The bounds of query lengths of which nothing is known."""


@dataclass(frozen=True)
class Step:
    """One step of some requests.

    Attributes:
        tokens: query tokens; rows past them belong to no request.
        query_start: ``[requests + 1]`` int32 on the device.
        lengths: ``[requests]`` int32 on the device, tokens with those of this step.
        table: ``[requests, columns]`` int32 on the device, cache blocks.
        causal: for all requests, or ``[requests]`` on the device, of which non-zero means causal.
        queries: bounds, known on the host, of the query tokens of the requests that have any.
        longest: most tokens that a request can ever have.
    """

    tokens: int
    query_start: Tensor
    lengths: Tensor
    table: Tensor
    causal: bool | Tensor
    queries: tuple[int, int]
    longest: int


@dataclass(frozen=True)
class Mathematics:
    """What a layer computes.

    Attributes:
        scale: factor on the scores, positive.
        window: keys that a query sees on each side, its own included; None for all.
        cap: bound of the scores; None for none.
        sinks: ``[heads]``, one more logit each; None for none.
        slopes: ``[heads]`` fp32 of ALiBi; None for none.
    """

    scale: float
    window: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None


def short_queries(group: int) -> int:
    """Return up to how many query tokens go to the kernel that splits the keys.

    As many as fit beside each other in the smallest matrix product, or in one that holds a token's
    heads.
    """
    return decode_tile(16, 2, group, 1, 1).tokens(group)


def attend(
    out: Tensor, query: Tensor, keys: Tensor, values: Tensor, step: Step, layer: Mathematics
) -> None:
    """Attend from each query token to the cached keys of its request.

    Args:
        out: ``[>= tokens, heads, D]``, contiguous last dimension; overwritten in the step's tokens.
        query: ``[>= tokens, heads, D]``, contiguous last dimension.
        keys, values: ``[blocks, block_size, kv_heads, D]``, equal strides, contiguous last
            dimension.
        step: the requests.
        layer: the mathematics.
    """
    heads, size = query.shape[1:]
    kv_heads, requests = keys.shape[2], step.lengths.shape[0]
    group = heads // kv_heads
    fewest, most = step.queries
    short = short_queries(group)
    itemsize = query.element_size()
    tensors = (keys, values, step.table, step.query_start, step.lengths)
    if fewest <= short:
        tile = decode_tile(size, itemsize, group, requests * kv_heads, step.longest)
        decode(out, query, *tensors, tile=tile, **_asked(step, layer))
    if most > short:
        prefill(
            out, query[: step.tokens], *tensors,
            shorter=short if fewest <= short else 0, most=most,
            tile=prefill_tile(size, itemsize, min(most, step.tokens) * group),
            **_asked(step, layer),
        )  # fmt: skip


def _asked(step: Step, layer: Mathematics) -> dict[str, Any]:
    """Return the arguments of both kernels that say what is computed."""
    return {"causal": step.causal, **vars(layer)}


def compile_variants(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    empty: Step,
    layer: Mathematics,
    requests: int,
    tokens: int,
) -> None:
    """Launch each variant of the kernels that :func:`attend` may need, for a step without work.

    Args:
        out, query: ``[1, heads, D]``, as in :func:`attend`; neither is used.
        keys, values: as in :func:`attend`; not read.
        empty: one request without query tokens and keys.
        layer: the mathematics.
        requests: most requests of a step.
        tokens: most query tokens of a request.
    """
    heads, size = query.shape[1:]
    kv_heads, itemsize = keys.shape[2], query.element_size()
    group = heads // kv_heads
    tensors = (out, query, keys, values, empty.table, empty.query_start, empty.lengths)
    short = short_queries(group)
    for tile in _decode_variants(size, itemsize, group, kv_heads, requests, empty.longest):
        decode(*tensors, tile=tile, **_asked(empty, layer))
    if tokens > short:
        for wide in {prefill_tile(size, itemsize, n * group) for n in (short + 1, tokens)}:
            prefill(*tensors, shorter=short, most=1, tile=wide, **_asked(empty, layer))


@functools.cache  # a model has many layers of a kind
def _decode_variants(
    size: int, itemsize: int, group: int, kv_heads: int, requests: int, longest: int
) -> tuple[DecodeTile, ...]:
    tiles = (
        decode_tile(size, itemsize, group, count * kv_heads, longest)
        for count in range(1, requests + 1)
    )
    return tuple(dict.fromkeys(variant_of(tile) for tile in tiles))
