"""Requests over a paged cache with random blocks, and attention in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_fl_flaggems.attention.planning import Mathematics, Step


@dataclass
class Paged:
    """Requests; each has some tokens in the cache, the last of which are queries.

    Attributes:
        query: ``[tokens, heads, size]``.
        keys, values: ``[blocks, block_size, kv_heads, size]`` with NaN in every unused slot.
        step: the requests.
        parts: of each request its keys and values, ``[length, kv_heads, size]``.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    step: Step
    parts: list[tuple[Tensor, Tensor]]


def make(
    requests: list[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    size: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    causal: bool | list[bool] = True,
    window: int | None = None,
    layout: str = "nhd",
    seed: int = 0,
) -> Paged:
    """Make requests of (tokens in the cache before, query tokens); blocks a window has passed go.

    Args:
        layout: "nhd" or "hnd" with the value behind the key, "halves": all keys, then all values.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    counts = [count for _, count in requests]
    lengths = [past + count for past, count in requests]
    columns = [-(-length // block_size) for length in lengths]
    blocks = sum(columns) + 3
    kv_heads = heads[1]
    if layout == "halves":
        cache = torch.full((2, blocks, block_size, kv_heads, size), torch.nan, dtype=dtype)
        keys, values = cache.unbind()
    else:
        shape = (block_size, kv_heads) if layout == "nhd" else (kv_heads, block_size)
        cache = torch.full((blocks, *shape, 2 * size), torch.nan, dtype=dtype)
        tokens = cache if layout == "nhd" else cache.transpose(1, 2)
        keys, values = tokens.split(size, dim=-1)
    order = iter((torch.randperm(blocks - 1, generator=random) + 1).tolist())
    table = torch.zeros((len(requests), max(columns, default=1) + 1), dtype=torch.int32)
    parts = []
    for row, length in enumerate(lengths):
        key, value = normal(length, kv_heads, size), normal(length, kv_heads, size)
        parts.append((key, value))
        first = 0 if window is None else max(0, length - counts[row] - window + 1)
        for column in range(first // block_size, columns[row]):
            block = next(order)
            table[row, column] = block
            end = min(block_size, length - column * block_size)
            part = slice(column * block_size, column * block_size + end)
            keys[block, :end], values[block, :end] = key[part], value[part]
    there = [count for count in counts if count]
    step = Step(
        tokens=sum(counts),
        query_start=torch.tensor([0, *counts]).cumsum(0).int(),
        lengths=torch.tensor(lengths).int(),
        table=table,
        causal=causal if isinstance(causal, bool) else torch.tensor(causal),
        queries=(min(there, default=0), max(there, default=0)),
        longest=4096,
    )
    return Paged(normal(sum(counts), heads[0], size) * 2, keys, values, step, parts)


def oracle(paged: Paged, layer: Mathematics) -> Tensor:
    """Return the outputs ``[tokens, heads, size]`` in float64."""
    outs = []
    row = 0
    step = paged.step
    for request, (key, value) in enumerate(paged.parts):
        count = int(step.query_start[request + 1] - step.query_start[request])
        causal = step.causal if isinstance(step.causal, bool) else bool(step.causal[request])
        group = paged.query.shape[1] // key.shape[1]
        k = key.double().repeat_interleave(group, dim=1)
        v = value.double().repeat_interleave(group, dim=1)
        query = paged.query[row : row + count].double()
        row += count
        scores = torch.einsum("qhd,khd->hqk", query, k) * layer.scale
        if layer.cap is not None:
            scores = layer.cap * torch.tanh(scores / layer.cap)
        position = len(key) - count + torch.arange(count)
        distance = position[:, None] - torch.arange(len(key))
        if layer.slopes is not None:
            scores = scores - layer.slopes.double()[:, None, None] * distance.abs()
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if causal:
            hidden |= distance < 0
        if layer.window is not None:
            hidden |= distance.abs() >= layer.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if layer.sinks is not None:
            extra = layer.sinks.double()[:, None, None].expand(-1, count, 1)
            scores = torch.cat((scores, extra), dim=-1)
        weights = scores.softmax(-1)[..., : len(key)]
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outs)
