"""Attention in float64, one query at a time, straight from the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl.testing.compare import Expected
from vllm_fl.testing.paged.scenario import Layer, Tokens


def attend(layer: Layer, tokens: Tokens, first: int, last: int, sinks: Tensor) -> Expected:
    """Return the outputs of the queries at positions first .. last - 1.

    A query at position p sees the keys at p - window + 1 .. p. A sink takes part in the softmax
    and has no value.
    """
    outputs, scales = [], []
    group = layer.heads // layer.kv_heads
    for position in range(first, last):
        begin = 0 if layer.window is None else max(0, position - layer.window + 1)
        keys = tokens.key[begin : position + 1].double().repeat_interleave(group, dim=1)
        values = tokens.value[begin : position + 1].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,khd->hk", tokens.query[position].double(), keys) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        if layer.sinks:
            scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
        weights = torch.softmax(scores, dim=1)[:, : len(keys)]
        outputs.append(torch.einsum("hk,khd->hd", weights, values))
        scales.append(torch.einsum("hk,khd->hd", weights, values.abs()))
    return Expected(torch.stack(outputs), layer.dtype, torch.stack(scales))


def mean_of_values(layer: Layer, tokens: Tokens, position: int) -> Tensor:
    """Return what attention would be if the scores did not count."""
    group = layer.heads // layer.kv_heads
    mean = tokens.value[: position + 1].double().mean(dim=0)
    return mean.repeat_interleave(group, dim=0)
