"""What a serving engine asks of one attention layer: requests that grow step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_fl.testing.tensors import short


@dataclass(frozen=True)
class Layer:
    """An attention layer.

    Attributes:
        dtype: of query, key, value and cache.
        heads: query heads.
        kv_heads: key and value heads.
        head_size: channels of a head.
        window: keys that a query sees, its own included; None for all.
        soft_cap: bound of the scores; None for none.
        sinks: whether each head has an extra logit.
    """

    dtype: torch.dtype
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def scale(self) -> float:
        """Factor on the scores; not the usual 1 / sqrt(head_size), so that it cannot be guessed."""
        return 1.5 * self.head_size**-0.5

    @property
    def name(self) -> str:
        """All that is not usual."""
        parts = [short(self.dtype), f"{self.heads}:{self.kv_heads}x{self.head_size}"]
        parts += [f"window{self.window}"] if self.window is not None else []
        parts += [f"cap{self.soft_cap:g}"] if self.soft_cap is not None else []
        parts += ["sinks"] if self.sinks else []
        return "-".join(parts)


@dataclass(frozen=True)
class Scenario:
    """Steps of one layer.

    Attributes:
        layer: the layer.
        steps: for each step, request -> number of its new tokens.
        garbage: what unwritten cache slots hold.
        padding: rows at the end of each step that belong to no request (slot -1).
        far: whether the blocks lie more than 2^31 elements into the cache.
    """

    layer: Layer
    steps: Sequence[dict[int, int]]
    garbage: float = 50.0
    padding: int = 0
    far: bool = False

    @property
    def lengths(self) -> dict[int, int]:
        """Request -> its length after the last step."""
        found: dict[int, int] = {}
        for step in self.steps:
            for request, tokens in step.items():
                found[request] = found.get(request, 0) + tokens
        return found


@dataclass(frozen=True)
class Tokens:
    """Query, key and value of every token of a request, on the host, rounded to the dtype.

    Attributes:
        query: ``[length, heads, head_size]``.
        key: ``[length, kv_heads, head_size]``.
        value: ``[length, kv_heads, head_size]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value


def make_tokens(scenario: Scenario) -> dict[int, Tokens]:
    """Return request -> its tokens.

    Queries are long, so that attention is far from uniform.
    """
    random = torch.Generator().manual_seed(20240607)
    layer = scenario.layer

    def normal(length: int, heads: int, scale: float = 1.0) -> Tensor:
        values = torch.randn((length, heads, layer.head_size), generator=random) * scale
        return values.to(layer.dtype)

    return {
        request: Tokens(
            normal(length, layer.heads, 2.0),
            normal(length, layer.kv_heads),
            normal(length, layer.kv_heads),
        )
        for request, length in scenario.lengths.items()
    }


def make_sinks(layer: Layer) -> Tensor:
    """Return one sink logit for each head, on the host, rounded to the dtype."""
    random = torch.Generator().manual_seed(3)
    return (torch.randn(layer.heads, generator=random) + 2).to(layer.dtype)
