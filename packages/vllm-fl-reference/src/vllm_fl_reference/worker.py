"""vLLM's CPU worker and model runner without the compiled code of a CPU build of vLLM."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from vllm.config import CacheConfig, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import get_memory_node_info
from vllm.utils.mem_constants import GiB_bytes
from vllm.utils.mem_utils import format_gib
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_fl.dispatch import VllmFLError
from vllm_fl_reference.vllm_compat import adapter

logger = init_logger(f"vllm.{__name__}")

DEFAULT_KV_CACHE_BYTES = 2 * GiB_bytes
"""KV-cache memory per worker, unless the user asks or one request of full length needs more."""


class CpuModelRunnerFL(CPUModelRunner):
    """vLLM's CPU model runner with PyTorch kernels."""

    def _postprocess_triton(self) -> None:
        """Replace Triton kernels; before vLLM 0.33 this is where its CPU runner does it."""
        adapter().bind_kernels()

    @torch.inference_mode()
    def check_model(self) -> None:
        """Run one small step through every layer, attention included.

        A model may need a kernel that exists only for accelerators. Without this step it would stop
        the engine at the first request; with it, the engine does not start.

        Raises:
            RuntimeError: If a layer fails.
        """
        try:
            self._dummy_run(num_tokens=8, force_attention=True)
        except (TypeError, AttributeError, RuntimeError) as error:  # how an absent kernel shows
            if isinstance(error, VllmFLError) or getattr(error, "__notes__", None):
                raise  # an operator's error, which says what it is
            message = (
                f"{self.model_config.model} does not run on CPU, probably because a layer needs a "
                f"kernel that exists only for accelerators ({type(error).__name__}: {error})."
            )
            raise RuntimeError(message) from error


class CpuWorkerFL(CPUWorker):
    """vLLM's CPU worker, started without binding memory and threads.

    Importing vLLM's CPU worker makes PyTorch's accelerator calls do nothing in this process, which
    the GPU code that it inherits relies on.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        # CPUWorker.__init__ is left out: it binds memory by the compiled init_cpu_memory_env.
        super(CPUWorker, self).__init__(
            vllm_config, local_rank, rank, distributed_init_method, is_driver_worker
        )
        self.parallel_config.disable_custom_all_reduce = True
        share = self.cache_config.gpu_memory_utilization / self.parallel_config.local_world_size
        self.requested_cpu_memory = int(get_memory_node_info().total_memory * share)

    def init_device(self) -> None:
        """Join the distributed group and build the model runner.

        CPUWorker's method also asks for preloaded OpenMP and allocator libraries, which help its
        compiled kernels, and forbids changing the number of threads.
        """
        self.device = torch.device("cpu")
        self._limit_threads()
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        self.model_runner = CpuModelRunnerFL(self.vllm_config, self.device)

    def _limit_threads(self) -> None:
        """Keep PyTorch's threads within this worker's share of the CPUs (cgroups included)."""
        if "OMP_NUM_THREADS" not in os.environ:
            share = max(1, adapter().available_cpus() // self.parallel_config.local_world_size)
            torch.set_num_threads(min(torch.get_num_threads(), share))
        logger.info("Rank %d computes with %d threads.", self.rank, torch.get_num_threads())

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        """Return no pool: vLLM asks out-of-tree platforms for a CuMem one."""
        return nullcontext()

    def determine_available_memory(self) -> int:
        """Return the bytes of KV cache: as the user asked, otherwise a moderate default."""
        asked = (
            self.cache_config.kv_cache_memory_bytes is not None
            or self.cache_config.gpu_memory_utilization != CacheConfig.gpu_memory_utilization
        )
        if asked:
            return super().determine_available_memory()
        specs = self.get_kv_cache_spec().values()
        one_request = sum(spec.max_memory_usage_bytes(self.vllm_config) for spec in specs)
        available = get_memory_node_info().available_memory
        limit = available // 2 // self.parallel_config.local_world_size
        size = min(max(DEFAULT_KV_CACHE_BYTES, one_request), limit)
        logger.info(
            "%s GiB of %s GiB available memory for the KV cache by default; "
            "--kv-cache-memory-bytes or --gpu-memory-utilization change it.",
            format_gib(size),
            format_gib(available),
        )
        return size

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Run one small step before the first request does."""
        self.model_runner.check_model()
        return super().compile_or_warm_up_model()
