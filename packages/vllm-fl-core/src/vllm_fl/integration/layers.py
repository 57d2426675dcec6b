"""vLLM's layers with their forward pass through dispatched operators.

A layer binds its operator when it is built. vLLM puts a class of this module in place of its own
by the class's name, so a subclass of a layer keeps its own mathematics unless it is named here.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from vllm_fl.dispatch.manager import bind_op

NormOutput: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class SiluAndMulFL(SiluAndMul):
    """vLLM's ``SiluAndMul`` through the operator ``silu_and_mul``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._op = bind_op("silu_and_mul")

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 2d] -> [..., d]."""
        fn = self._op.fn
        try:
            return fn(x)
        except Exception as error:
            return self._op.recover(fn, error, x)


class GeluAndMulFL(GeluAndMul):
    """vLLM's ``GeluAndMul`` through the operator ``gelu_and_mul``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._op = bind_op("gelu_and_mul")

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 2d] -> [..., d]."""
        fn = self._op.fn
        try:
            return fn(x, self.approximate)
        except Exception as error:
            return self._op.recover(fn, error, x, self.approximate)


class RMSNormFL(RMSNorm):
    """vLLM's ``RMSNorm`` through the operator ``rms_norm``.

    Norms without a weight, and norms over a part of the hidden size, are vLLM's own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._op = bind_op("rms_norm")
        self._dispatched = self.has_weight and self.variance_size_override is None

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> NormOutput:
        """x [..., n] and residual of its shape or None -> out, or (out, residual)."""
        if not self._dispatched:
            return self.forward_native(x, residual)
        fn = self._op.fn
        weight, epsilon = self.weight.data, self.variance_epsilon
        try:
            return fn(x, residual, weight, epsilon)
        except Exception as error:
            return self._op.recover(fn, error, x, residual, weight, epsilon)


class GemmaRMSNormFL(GemmaRMSNorm):
    """vLLM's ``GemmaRMSNorm`` (scale 1 + weight) through the operator ``gemma_rms_norm``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._op = bind_op("gemma_rms_norm")

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> NormOutput:
        """x [..., n] and residual of its shape or None -> out, or (out, residual)."""
        fn = self._op.fn
        weight, epsilon = self.weight.data, self.variance_epsilon
        try:
            return fn(x, residual, weight, epsilon)
        except Exception as error:
            return self._op.recover(fn, error, x, residual, weight, epsilon)


class DispatchedRotary:
    """Mixin for ``RotaryEmbedding`` and those of its subclasses that only make another cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._op = bind_op("rotary_embedding")

    def forward_oot(
        self: Any,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """positions [T]; query and key [T, heads * head_size] or [T, heads, head_size]."""
        positions = positions.flatten()
        tokens, size = positions.shape[0], self.head_size
        cache = self._match_cos_sin_cache_dtype(query)
        cos, sin = cache.chunk(2, dim=-1)
        query_heads = query.view(tokens, -1, size)
        key_heads = None if key is None else key.view(tokens, -1, size)
        call = (query_heads, key_heads, cos, sin, positions, self.is_neox_style)
        fn = self._op.fn
        try:
            rotated, rotated_key = fn(*call)
        except Exception as error:
            rotated, rotated_key = self._op.recover(fn, error, *call)
        return (
            rotated.reshape(query.shape),
            None if key is None else rotated_key.reshape(key.shape),
        )


def rotary_classes() -> list[type[RotaryEmbedding]]:
    """Return ``RotaryEmbedding`` and every subclass that rotates exactly as it does."""
    found: list[type[RotaryEmbedding]] = []
    pending: list[type[RotaryEmbedding]] = [RotaryEmbedding]
    forwards = ("forward", "forward_native", "forward_oot")
    while pending:
        cls = pending.pop(0)
        pending += cls.__subclasses__()
        if not issubclass(cls, DispatchedRotary) and all(
            getattr(cls, name) is getattr(RotaryEmbedding, name) for name in forwards
        ):
            found.append(cls)
    return found


def layer_classes() -> dict[str, type[CustomOp]]:
    """Return vLLM class name -> the class that takes its place."""
    layers: dict[str, type[CustomOp]] = {
        base.__name__: layer
        for base, layer in (
            (SiluAndMul, SiluAndMulFL),
            (GeluAndMul, GeluAndMulFL),
            (RMSNorm, RMSNormFL),
            (GemmaRMSNorm, GemmaRMSNormFL),
        )
    }
    for base in rotary_classes():
        layers[base.__name__] = type(f"{base.__name__}FL", (DispatchedRotary, base), {})
    return layers


def install() -> None:
    """Register the layers with vLLM, once a process."""
    if "RMSNorm" in op_registry_oot and op_registry_oot["RMSNorm"] is RMSNormFL:
        return
    for name, layer in layer_classes().items():
        CustomOp.register_oot(layer, name=name)
