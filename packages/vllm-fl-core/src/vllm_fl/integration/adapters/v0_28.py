"""vLLM 0.28 and newer."""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe.router.fused_topk_router import (
    _get_padding_mask as padding_mask,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod as UnquantizedMethod,
)

__all__ = ["UnquantizedMethod", "padding_mask"]
