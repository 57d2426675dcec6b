"""The facts about this backend. Imports neither torch nor vLLM."""

from __future__ import annotations

from vllm_fl.dispatch.backend import Backend, Device, Implementation
from vllm_fl.dispatch.types import BackendImplKind

_OPS = "vllm_fl_reference.ops"


def _always() -> bool:
    return True


class ReferenceBackend(Backend):
    """Every operator in plain PyTorch; out of place, on any device, nearly all traceable."""

    name = "reference"
    kind = BackendImplKind.REFERENCE
    operators = {
        "silu_and_mul": f"{_OPS}.activation:silu_and_mul",
        "gelu_and_mul": f"{_OPS}.activation:gelu_and_mul",
        "rms_norm": Implementation(f"{_OPS}.norm:rms_norm", in_place=False),
        "gemma_rms_norm": f"{_OPS}.norm:gemma_rms_norm",
        "rotary_embedding": Implementation(f"{_OPS}.rotary:rotary_embedding", in_place=False),
        "reshape_and_cache_flash": f"{_OPS}.cache:reshape_and_cache_flash",
        "topk_softmax": f"{_OPS}.routing:topk_softmax",
        "grouped_topk": f"{_OPS}.routing:grouped_topk",
        "moe_align_block_size": f"{_OPS}.moe:moe_align_block_size",
        "moe_sum": f"{_OPS}.moe:moe_sum",
        # A loop over the experts that have tokens cannot be traced.
        "fused_experts": Implementation(f"{_OPS}.moe:fused_experts", traceable=False),
        "attention_backend": f"{_OPS}.attention:attention_backend",
    }
    device = Device(
        name="cpu",
        platform="vllm_fl_reference.platform:CpuPlatformFL",
        detect=_always,
        rank=0,
    )
