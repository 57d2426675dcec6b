"""The facts about this backend. Imports neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from vllm_fl.dispatch.backend import Backend, ExpertsShape, Implementation
from vllm_fl.dispatch.types import BackendImplKind, Decision, OpImpl
from vllm_fl_flaggems.availability import batch_invariant, interpreted, triton_availability
from vllm_fl_flaggems.gems import aten
from vllm_fl_flaggems.gems.source import installed
from vllm_fl_flaggems.gems.start import start
from vllm_fl_flaggems.notes import facts
from vllm_fl_flaggems.warmup import token_ranges

_OPS = "vllm_fl_flaggems.ops"
_FLOATS = ("float16", "bfloat16", "float32")
_INTS = ("int32", "int64")
# Their tiles follow the number of tokens, hence the order in which a row is summed. Attention's
# parts do, too: its class leaves supports_batch_invariance at vLLM's no.
_OF_THE_BATCH = ("topk_softmax", "grouped_topk", "fused_experts")


def _operator(
    module: str, name: str, supports: str, dtypes: tuple[str, ...] | None = _FLOATS
) -> Implementation:
    return Implementation(
        f"{_OPS}.{module}:{name}",
        supports=f"{_OPS}.{module}:{supports}",
        dtypes=dtypes,
        note="vllm_fl_flaggems.notes:note",
    )


class FlagGemsBackend(Backend):
    """Triton kernels; donated arguments are overwritten where their layout allows."""

    name = "flaggems"
    kind = BackendImplKind.DEFAULT
    operators = {
        "silu_and_mul": _operator("activation", "silu_and_mul", "supports_silu"),
        "gelu_and_mul": _operator("activation", "gelu_and_mul", "supports_gelu"),
        "rms_norm": _operator("norm", "rms_norm", "supports"),
        "gemma_rms_norm": _operator("norm", "gemma_rms_norm", "supports"),
        "rotary_embedding": _operator("rotary", "rotary_embedding", "supports"),
        "reshape_and_cache_flash": _operator("cache", "reshape_and_cache_flash", "supports"),
        "attention_backend": _operator("attention", "attention_backend", "supports", None),
        "topk_softmax": _operator("routing", "topk_softmax", "supports_topk", ("float32",)),
        "grouped_topk": _operator("routing", "grouped_topk", "supports_grouped"),
        "moe_align_block_size": _operator("align", "moe_align_block_size", "supports", _INTS),
        "moe_sum": _operator("moe_sum", "moe_sum", "supports"),
        "fused_experts": _operator("experts", "fused_experts", "supports"),
    }

    packages = ("flag-gems",)
    kernels = {
        "triton:vllm_fl_flaggems.*": ("", "vllm-fl-flaggems"),
        "triton:vllm_fl_flaggems.kernels.norm": ("rms_norm", "vllm-fl-flaggems"),
        "triton:vllm_fl_flaggems.kernels.activation": ("gated activation", "vllm-fl-flaggems"),
        "triton:vllm_fl_flaggems.kernels.rotary": ("rotary_embedding", "vllm-fl-flaggems"),
        "triton:vllm_fl_flaggems.kernels.cache": ("reshape_and_cache_flash", "vllm-fl-flaggems"),
        "triton:vllm_fl_flaggems.kernels.attention_*": ("attention", "vllm-fl-flaggems"),
        "triton:vllm_fl_flaggems.kernels.topk": ("topk_softmax", "vllm-fl-flaggems"),
        "triton:vllm_fl_flaggems.kernels.grouped": ("grouped_topk", "vllm-fl-flaggems"),
        "triton:vllm_fl_flaggems.kernels.align": ("moe_align_block_size", "vllm-fl-flaggems"),
        "triton:vllm_fl_flaggems.kernels.moe_sum": ("moe_sum", "vllm-fl-flaggems"),
        "triton:vllm_fl_flaggems.kernels.experts": ("fused_experts", "vllm-fl-flaggems"),
        "triton:_gen_module_*": ("", "flag_gems"),  # its generated pointwise kernels
    }

    def implementations(self) -> Iterator[OpImpl | Exception]:
        """As in the base class, but for operators whose rows depend on the rest of the batch."""
        for impl in super().implementations():
            if isinstance(impl, OpImpl) and impl.op_name in _OF_THE_BATCH:
                yield replace(impl, available=self.is_available_beside_others)
            else:
                yield impl

    def knows(self, name: str) -> object:
        """Whether flag_gems has ATen operators of that name."""
        return aten.knows(installed(), name)

    def start_worker(self, rank: int) -> None:
        """Let flag_gems run ATen operators, if the user asks for it."""
        start(rank)

    def warmup_tokens(self, most: int, experts: Sequence[ExpertsShape]) -> list[range]:
        """The token counts between which the kernels' variants change; none if interpreted."""
        if interpreted():
            return []
        from vllm_fl_flaggems.kernels.launch import shared_memory

        return token_ranges(most, experts, shared_memory())

    def facts(self) -> dict[str, object]:
        """What is said about flag_gems in `vllm-fl doctor`."""
        return facts()

    def is_available(self) -> object:
        """Whether Triton is installed, in a tested version, and has a device."""
        return triton_availability()

    def is_available_beside_others(self) -> Decision:
        """Whether it is available to operators whose rows depend on the rest of the batch."""
        if batch_invariant():
            return Decision.no(
                "VLLM_BATCH_INVARIANT is set, and the kernel's tiles follow the number of tokens"
            )
        return triton_availability()
