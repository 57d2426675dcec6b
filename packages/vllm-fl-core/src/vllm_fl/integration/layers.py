"""vLLM's layers with their forward pass through dispatched operators.

A layer binds its operator when it is built. vLLM puts a class of this module in place of its own
by the class's name, so a subclass of a layer keeps its own mathematics unless it is named here.
vLLM calls ``forward_oot`` on an out-of-tree platform and ``forward_cuda`` on a CUDA one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from vllm_fl.dispatch.calls import Function
from vllm_fl.dispatch.default import bind_op, get_default_manager
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.handle import BoundOp
from vllm_fl.integration.custom_ops import CUSTOM_OPS
from vllm_fl.integration.handover import adopt, note_bound


def bind(op_name: str) -> BoundOp:
    """Bind an operator for a layer that is being built, under the policy vLLM was given."""
    vllm_config = get_current_vllm_config()
    adopt(vllm_config)
    oplist = get_default_manager().usage.oplist
    if oplist is not None and torch.distributed.is_initialized():
        oplist.rank = torch.distributed.get_rank()
    op = bind_op(op_name)
    note_bound(vllm_config, op_name)
    return op


def recover(op: BoundOp, fn: Function, error: Exception, *args: Any) -> Any:
    """Answer a call in which ``fn`` raised ``error``; while vLLM compiles, raise it."""
    if torch.compiler.is_compiling():
        raise error
    return op.recover(fn, error, *args)


NormOutput: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class SiluAndMulFL(SiluAndMul):
    """vLLM's ``SiluAndMul`` through the operator ``silu_and_mul``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._op = bind("silu_and_mul")

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 2d] -> [..., d]."""
        fn = self._op.fn
        try:
            return fn(x)
        except Exception as error:
            return recover(self._op, fn, error, x)

    forward_cuda = forward_oot


class GeluAndMulFL(GeluAndMul):
    """vLLM's ``GeluAndMul`` through the operator ``gelu_and_mul``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._op = bind("gelu_and_mul")

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 2d] -> [..., d]."""
        fn = self._op.fn
        try:
            return fn(x, self.approximate)
        except Exception as error:
            return recover(self._op, fn, error, x, self.approximate)

    forward_cuda = forward_oot


class RMSNormFL(RMSNorm):
    """vLLM's ``RMSNorm`` through the operator ``rms_norm``.

    Norms without a weight, norms over a part of the hidden size, and the batch-invariant ones of
    ``VLLM_BATCH_INVARIANT`` are vLLM's own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._op = bind("rms_norm")
        self._dispatched = (
            self.has_weight
            and self.variance_size_override is None
            and not envs.VLLM_BATCH_INVARIANT
        )

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> NormOutput:
        """x [..., n] and residual of its shape or None -> out, or (out, residual)."""
        if not self._dispatched:
            return super().forward_oot(x, residual)
        return self._dispatch(x, residual)

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> NormOutput:
        """As ``forward_oot``."""
        if not self._dispatched:
            return super().forward_cuda(x, residual)
        return self._dispatch(x, residual)

    def _dispatch(self, x: torch.Tensor, residual: torch.Tensor | None) -> NormOutput:
        fn = self._op.fn
        weight, epsilon = self.weight.data, self.variance_epsilon
        try:
            return fn(x, residual, weight, epsilon)
        except Exception as error:
            return recover(self._op, fn, error, x, residual, weight, epsilon)


class GemmaRMSNormFL(GemmaRMSNorm):
    """vLLM's ``GemmaRMSNorm`` (scale 1 + weight) through the operator ``gemma_rms_norm``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._op = bind("gemma_rms_norm")

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> NormOutput:
        """x [..., n] and residual of its shape or None -> out, or (out, residual)."""
        fn = self._op.fn
        weight, epsilon = self.weight.data, self.variance_epsilon
        try:
            return fn(x, residual, weight, epsilon)
        except Exception as error:
            return recover(self._op, fn, error, x, residual, weight, epsilon)

    forward_cuda = forward_oot


class DispatchedRotary:
    """Mixin for ``RotaryEmbedding`` and those of its subclasses that only make another cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._op = bind("rotary_embedding")

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
            rotated, rotated_key = recover(self._op, fn, error, *call)
        return (
            rotated.reshape(query.shape),
            None if key is None else rotated_key.reshape(key.shape),
        )

    forward_cuda = forward_oot


def rotary_classes() -> list[type[RotaryEmbedding]]:
    """Return ``RotaryEmbedding`` and every subclass that rotates exactly as it does."""
    found: list[type[RotaryEmbedding]] = []
    pending: list[type[RotaryEmbedding]] = [RotaryEmbedding]
    forwards = ("forward", "forward_native", "forward_oot", "forward_cuda")
    while pending:
        cls = pending.pop(0)
        pending += cls.__subclasses__()
        if not issubclass(cls, DispatchedRotary) and all(
            getattr(cls, name) is getattr(RotaryEmbedding, name) for name in forwards
        ):
            found.append(cls)
    return found


def layer_classes() -> dict[str, dict[str, type[CustomOp]]]:
    """Return operator -> vLLM class name -> the class that takes its place."""
    from vllm_fl.integration import moe  # which binds its operators with this module's function

    return {
        "silu_and_mul": {SiluAndMul.__name__: SiluAndMulFL},
        "gelu_and_mul": {GeluAndMul.__name__: GeluAndMulFL},
        "rms_norm": {RMSNorm.__name__: RMSNormFL},
        "gemma_rms_norm": {GemmaRMSNorm.__name__: GemmaRMSNormFL},
        "rotary_embedding": {
            base.__name__: type(f"{base.__name__}FL", (DispatchedRotary, base), {})
            for base in rotary_classes()
        },
        **moe.layer_classes(),
    }


def install(operators: Iterable[str]) -> None:
    """Register the layers of these operators with vLLM, and take back those of all others.

    Raises:
        ConfigError: another plugin has registered a layer in place of the same one of vLLM's.
    """
    classes = layer_classes()
    wanted = {
        name: (layer, op_name)
        for op_name in operators
        for name, layer in classes[op_name].items()  # one layer may call several operators
    }
    ours = {name for name, cls in op_registry_oot.items() if cls.__module__.startswith("vllm_fl.")}
    for name in ours - wanted.keys():
        del op_registry_oot[name]
    for name in wanted.keys() - ours:
        layer, op_name = wanted[name]
        if name in op_registry_oot:
            other = op_registry_oot[name]
            raise ConfigError(
                f"In place of vLLM's {name} another plugin has registered "
                f"{other.__module__}.{other.__qualname__}, and vllm-fl would register "
                f"{layer.__module__}.{layer.__qualname__}. Add {op_name} to VLLM_FL_OOT_BLACKLIST "
                "to keep the other plugin's, or leave that plugin out (VLLM_PLUGINS)."
            )
        CustomOp.register_oot(layer, name=name)
        if op_name in CUSTOM_OPS:  # vLLM has put the class's name, custom_ops say this one
            layer.name = op_name
