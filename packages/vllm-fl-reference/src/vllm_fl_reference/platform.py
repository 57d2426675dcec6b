"""vLLM's CPU platform, out of tree: stock vLLM wheels, also those built for CUDA, run on a CPU.

:class:`vllm.platforms.cpu.CpuPlatform` is written for a CPU build of vLLM. What is overridden here
is what needs that build's compiled kernels, its thread binding, or a compiler at run time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum

from vllm_fl.integration.platform import PlatformFL
from vllm_fl_reference.vllm_compat import adapter
from vllm_fl_reference.vllm_compat.common import prepare_process

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

# A child of vLLM's logger, so that the lines appear where vLLM's do.
logger = init_logger(f"vllm.{__name__}")


class CpuPlatformFL(PlatformFL, CpuPlatform):
    """The CPU as an out-of-tree platform, with PyTorch implementations only."""

    _enum = PlatformEnum.OOT
    simple_compile_backend = "eager"
    """Small helper functions are not given to Inductor, which needs a C++ compiler."""

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        """Decide for model runner V1, before any vLLM configuration exists.

        Runner V2 consists of Triton kernels. vLLM has no other switch for it than this variable.
        """
        super().pre_register_and_update(parser)
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Run models eagerly unless the user chose a compilation mode."""
        from vllm.config import CompilationMode

        super().apply_config_platform_defaults(vllm_config)
        if vllm_config.compilation_config.mode is None:
            vllm_config.compilation_config.mode = CompilationMode.NONE
            logger.info_once("Models run eagerly on this platform (compilation mode NONE).")

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Adapt the configuration as vLLM's CPU platform does, then take back what is not ours.

        Raises:
            ValueError: If the configuration asks for something that needs kernels that exist only
                on accelerators or in a CPU build of vLLM.
        """
        _refuse_unsupported(vllm_config)
        cache_config = vllm_config.cache_config
        parallel_config = vllm_config.parallel_config
        block_size = cache_config.block_size
        executor = parallel_config.distributed_executor_backend
        if parallel_config.worker_cls == "auto":
            parallel_config.worker_cls = "vllm_fl_reference.worker.CpuWorkerFL"

        with _without_advice_on_compiled_kernels():
            super().check_and_update_config(vllm_config)

        # vLLM's CPU attention wants 128 tokens in a block; what a backend prefers is asked later.
        if not cache_config.user_specified_block_size:
            cache_config.block_size = block_size
        # vLLM gives one worker its own process to bind threads to cores; nothing is bound here.
        parallel_config.distributed_executor_backend = executor
        adapter().set_worker_threads(parallel_config.local_world_size)
        # Engine and API server want CPU time too. A thread that spins while it waits for its
        # siblings then keeps them from running: 0.1 ms become 10 ms for a small matrix product.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        prepare_process()

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Ask the attention backend, as accelerators do, instead of preferring 128 tokens."""
        super(CpuPlatform, cls).update_block_size_for_backend(vllm_config)

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Refuse quantized models: their kernels are compiled.

        Raises:
            ValueError: Always.
        """
        message = f"{quant} quantization is currently not supported in {cls.device_name}."
        raise ValueError(message)

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing: vLLM's compiled CPU kernels are not in its ordinary wheels."""

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Register the PyTorch kernels; vLLM has this hook since 0.33."""
        adapter().bind_kernels()


def _refuse_unsupported(vllm_config: VllmConfig) -> None:
    parallel_config = vllm_config.parallel_config
    requests = {
        "Model runner V2 (VLLM_USE_V2_MODEL_RUNNER=1)": vllm_config.use_v2_model_runner,
        "Speculative decoding": vllm_config.speculative_config is not None,
        "Decode context parallelism": parallel_config.decode_context_parallel_size > 1,
    }
    for feature, requested in requests.items():
        if requested:
            message = f"{feature} is not supported on CPU: it needs kernels of an accelerator."
            raise ValueError(message)


@contextmanager
def _without_advice_on_compiled_kernels() -> Iterator[None]:
    """Drop warnings about CPU kernels of vLLM that do not run on this platform."""
    advice = (
        "CPU backend prefers block_size is multiples of 32",
        "Triton is not installed. triton-cpu is expected",
        "Reset SSM cache type to float32",
    )

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(advice)

    vllm_logger = logging.getLogger(CpuPlatform.__module__)
    vllm_logger.addFilter(wanted)
    try:
        yield
    finally:
        vllm_logger.removeFilter(wanted)
