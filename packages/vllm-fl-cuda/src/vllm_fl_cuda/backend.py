"""The facts about this backend. Imports neither torch nor vLLM."""

from __future__ import annotations

from vllm_fl.dispatch.backend import Backend, Device, Implementation
from vllm_fl.dispatch.state import may_run_on
from vllm_fl.dispatch.types import BackendImplKind
from vllm_fl_cuda import nvml
from vllm_fl_cuda.profile import KERNELS

_OPS = "vllm_fl_cuda.ops"
_FLOATS = ("float16", "bfloat16", "float32")  # what vLLM's kernels are instantiated for


def _kernel(
    module: str, name: str, dtypes: tuple[str, ...] | None = _FLOATS, traceable: bool = True
) -> Implementation:
    """An operator whose predicate stands beside it, in the function ``<operator>_supports``."""
    function = f"{_OPS}.{module}:{name}"
    return Implementation(
        function, supports=f"{function}_supports", dtypes=dtypes, traceable=traceable
    )


class CudaBackend(Backend):
    """vLLM's own CUDA kernels and FlashAttention."""

    name = "cuda"
    kind = BackendImplKind.VENDOR
    vendor = "cuda"
    operators = {
        "silu_and_mul": _kernel("activation", "silu_and_mul"),
        "gelu_and_mul": _kernel("activation", "gelu_and_mul"),
        "rms_norm": _kernel("norm", "rms_norm"),
        "rotary_embedding": _kernel("rotary", "rotary_embedding"),
        "reshape_and_cache_flash": _kernel("cache", "reshape_and_cache_flash"),
        "topk_softmax": _kernel("routing", "topk_softmax", dtypes=("float32",)),
        # The kernel divides the weights by their sum in the dtype of the scores. vLLM tells torch
        # nothing about the shapes that it returns.
        "grouped_topk": _kernel("routing", "grouped_topk", ("float32",), traceable=False),
        "moe_align_block_size": _kernel("experts", "moe_align_block_size", ("int32", "int64")),
        "moe_sum": _kernel("experts", "moe_sum"),
        # The kernel multiplies fp32 in TF32, which the operator's tolerance does not allow.
        "fused_experts": _kernel("experts", "fused_experts", ("float16", "bfloat16")),
        "attention_backend": Implementation(
            f"{_OPS}.attention:attention_backend",
            supports=f"{_OPS}.attention:attention_backend_supports",
        ),
    }
    known_failures = {
        "rms_norm/rounding/*-before_weight": "vLLM's kernel forms the product with the weight in "
        "fp32 and rounds once, which is nearer to the exact result than what vLLM's layer does",
        "attention_backend/*/float16*sinks*": "FlashAttention 3 takes sinks in bf16 alone, and its "
        "class in vLLM does not say so",
    }
    device = Device(
        name="cuda",
        platform="vllm_fl_cuda.platform:CudaPlatformFL",
        detect=nvml.detect,
        defaults="vllm_fl_cuda:cuda.yaml",
        rank=100,
        arch=nvml.arch,
    )
    kernels = KERNELS

    def is_available(self) -> object:
        """Whether there is a GPU, and vLLM does not run on another device of this machine."""
        return nvml.detect() and may_run_on(self.device)
