"""The facts about this backend. Imports neither torch nor torch_npu nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_fl.dispatch.backend import Backend, Device, Implementation
from vllm_fl.dispatch.state import may_run_on
from vllm_fl.dispatch.types import BackendImplKind
from vllm_fl_ascend import installation

_OPS = "vllm_fl_ascend.ops"
_FLOATS = ("float16", "bfloat16", "float32")
_HALVES = ("float16", "bfloat16")


def _operator(
    module: str, name: str, dtypes: tuple[str, ...] = _FLOATS, *, in_place: bool = False
) -> Implementation:
    """An operator whose predicate stands beside it, in the function ``<operator>_supports``."""
    return Implementation(
        f"{_OPS}.{module}:{name}",
        supports=f"{_OPS}.{module}:{name}_supports",
        dtypes=dtypes,
        in_place=in_place,
    )


class AscendBackend(Backend):
    """The operators of torch_npu, and attention over vLLM's paged cache with them."""

    name = "ascend"
    kind = BackendImplKind.VENDOR
    vendor = "ascend"
    operators = {
        "silu_and_mul": _operator("activation", "silu_and_mul"),
        "gelu_and_mul": _operator("activation", "gelu_and_mul"),
        "rms_norm": _operator("norm", "rms_norm"),
        "gemma_rms_norm": _operator("norm", "gemma_rms_norm"),
        "rotary_embedding": _operator("rotary", "rotary_embedding"),
        "reshape_and_cache_flash": Implementation(
            f"{_OPS}.cache:reshape_and_cache_flash",
            supports=f"{_OPS}.cache:reshape_and_cache_flash_supports",
            dtypes=_FLOATS,
            traceable=False,  # how many tokens are no padding is not known to a tracer
        ),
        "topk_softmax": Implementation(
            f"{_OPS}.routing:topk_softmax", supports=f"{_OPS}.routing:topk_softmax_supports"
        ),
        "grouped_topk": _operator("routing", "grouped_topk"),
        "fused_experts": _operator("experts", "fused_experts", _HALVES),
        "attention_backend": Implementation(
            f"{_OPS}.attention:attention_backend",
            supports=f"{_OPS}.attention:attention_backend_supports",
        ),
    }
    device = Device(
        name="npu",
        platform="vllm_fl_ascend.platform:AscendPlatformFL",
        detect=installation.detect,
        defaults="vllm_fl_ascend:ascend.yaml",
        rank=100,
    )
    packages = ("torch-npu",)
    known_failures = {
        "rms_norm/rounding/*": "CANN's kernel multiplies by the weight in fp32 and rounds once",
        "attention_backend/offsets/*": "the vendor's operator takes caches of up to 2^31 elements",
    }

    def is_available(self) -> object:
        """Whether there is a usable NPU, and vLLM does not run on another device of the machine."""
        return installation.detect() and may_run_on(self.device)

    def facts(self) -> Mapping[str, object]:
        """Versions of driver, CANN, torch_npu and torch."""
        return installation.versions()
