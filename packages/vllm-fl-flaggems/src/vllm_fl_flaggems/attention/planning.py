"""Which kernels a step needs, and the call that runs them; torch and Triton only.

A step may mix requests of one query token with requests of thousands. Requests with few query
tokens are given to the kernel that splits the keys, those with many to the one that does not;
each kernel finds the lengths on the device and passes over the requests that are not its own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import Tensor

from vllm_fl_flaggems.kernels.attention_decode import decode
from vllm_fl_flaggems.kernels.attention_prefill import prefill
from vllm_fl_flaggems.tiles import decode_tile, prefill_tile

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
    if fewest <= short:
        tile = decode_tile(size, itemsize, group, requests * kv_heads, step.longest)
        decode(
            out, query, keys, values, step.table, step.query_start, step.lengths,
            scale=layer.scale, causal=step.causal, window=layer.window, cap=layer.cap,
            sinks=layer.sinks, slopes=layer.slopes, tile=tile,
        )  # fmt: skip
    if most > short:
        prefill(
            out, query[: step.tokens], keys, values, step.table, step.query_start, step.lengths,
            shorter=short if fewest <= short else 0, most=most,
            scale=layer.scale, causal=step.causal, window=layer.window, cap=layer.cap,
            sinks=layer.sinks, slopes=layer.slopes,
            tile=prefill_tile(size, itemsize, min(most, step.tokens) * group),
        )  # fmt: skip
