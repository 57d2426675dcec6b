"""Ascend NPUs as an out-of-tree platform of vLLM."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

import torch
import torch_npu  # noqa: F401  # gives torch the device type "npu", also where autoload is off
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_fl.integration.platform import PlatformFL
from vllm_fl_ascend.device import DEVICE
from vllm_fl_ascend.installation import VISIBLE

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils.argparse_utils import FlexibleArgumentParser

# A child of vLLM's logger, so that the lines appear where vLLM's do.
logger = init_logger(f"vllm.{__name__}")


class AscendPlatformFL(PlatformFL, Platform):
    """NPUs through torch_npu: eager mode, HCCL, vLLM's worker and V1 model runner.

    vLLM's own kernels, compiled or in Triton, are not there; what vLLM offers beside them in plain
    PyTorch is used.
    """

    _enum = PlatformEnum.OOT
    device_name = "npu"
    device_type = DEVICE
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    dist_backend = "hccl"
    device_control_env_var = VISIBLE
    ray_noset_device_env_vars: ClassVar[list[str]] = [f"RAY_EXPERIMENTAL_NOSET_{VISIBLE}"]
    simple_compile_backend = "eager"
    supported_quantization: ClassVar[list[str]] = []

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        """Decide for model runner V1: V2 consists of Triton kernels.

        vLLM has no other switch for it than this variable.
        """
        super().pre_register_and_update(parser)
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Run models eagerly.

        Raises:
            ValueError: The user asked for compilation or graphs. vLLM itself would drop the latter
                without a word on a platform that has none.
        """
        from vllm.config import CompilationMode, CUDAGraphMode

        super().apply_config_platform_defaults(vllm_config)
        compilation = vllm_config.compilation_config
        if compilation.mode not in (None, CompilationMode.NONE):
            raise _unsupported(
                f"Compilation mode {compilation.mode}",
                "models run eagerly; leave the mode out or set it to 0",
            )
        if compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE):
            raise _unsupported(
                f"Graph mode {compilation.cudagraph_mode}",
                "attention takes lengths as numbers on the host, which a graph would freeze",
            )
        if compilation.mode is None:
            logger.info_once("Models run eagerly on this platform (compilation mode NONE).")
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse what has no implementation here, and name the worker.

        Raises:
            ValueError: The configuration asks for something that does not run on an NPU here.
        """
        _refuse_unsupported(vllm_config)
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_fl_ascend.worker.AscendWorkerFL"
        super().check_and_update_config(vllm_config)

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Refuse quantised models: no operator for their kernels is implemented.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{quant} quantization is currently not supported in {cls.device_name}.")

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing: vLLM's own kernels are built for other devices."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Return the name of the chip, such as Ascend910B3."""
        name: str = torch.npu.get_device_name(device_id)
        return name

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        """Return None: there is nothing on an NPU that CUDA's numbers would say."""
        return None

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Return the bytes of the device's memory."""
        total: int = torch.npu.get_device_properties(device_id).total_memory
        return total

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        """Return the bytes that PyTorch has allocated at most since the last call."""
        torch.npu.reset_peak_memory_stats(device)
        usage: float = torch.npu.max_memory_allocated(device)
        return usage

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Return the number of cube cores, which multiply matrices."""
        cores: int = torch.npu.get_device_properties(device_id).cube_core_num
        return cores

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Make ``device`` this process's current one."""
        torch.npu.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed the generators of all devices."""
        torch.npu.manual_seed_all(seed)

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Return True, as vLLM's other devices do."""
        return True

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Return True: layers with and without a sliding window may have caches of their own."""
        return True


def _refuse_unsupported(vllm_config: VllmConfig) -> None:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    reasons = {
        "Model runner V2 (VLLM_USE_V2_MODEL_RUNNER=1)": (
            vllm_config.use_v2_model_runner,
            "it consists of Triton kernels",
        ),
        "Speculative decoding": (
            vllm_config.speculative_config is not None,
            "vLLM's rejection sampler consists of Triton kernels",
        ),
        "Context parallelism": (
            parallel.decode_context_parallel_size > 1,
            "attention has no implementation of it",
        ),
        "Sleep mode": (
            model is not None and model.enable_sleep_mode,
            "vLLM's memory pools are CUDA's",
        ),
    }
    for feature, (asked, reason) in reasons.items():
        if asked:
            raise _unsupported(feature, reason)


def _unsupported(feature: str, reason: str) -> ValueError:
    return ValueError(f"{feature} is not supported on an NPU: {reason}.")
