"""vLLM 0.26 and 0.27."""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

__all__ = ["UnquantizedMethod", "padding_mask"]


class UnquantizedMethod(UnquantizedFusedMoEMethod):
    """Answers this vLLM's question for a modular kernel, which its own method raises at."""

    def maybe_make_prepare_finalize(self, routing_tables: object = None) -> None:
        """Return nothing: vLLM then leaves the method as it is."""


def padding_mask(tokens: int) -> None:
    """Return None: routing in this vLLM does not ask which rows are padding."""
