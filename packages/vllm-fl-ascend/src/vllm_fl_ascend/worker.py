"""vLLM's worker and V1 model runner on an NPU."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.mem_utils import MemorySnapshot
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.utils import report_usage_stats
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.workspace import init_workspace_manager

from vllm_fl_ascend import ledger
from vllm_fl_ascend.device import DEVICE


class AscendModelRunnerFL(GPUModelRunner):
    """vLLM's V1 model runner; cascade attention, which has no implementation here, is off."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cascade_attn_enabled = False


class AscendWorkerFL(Worker):
    """vLLM's worker with an NPU in place of a GPU."""

    def init_device(self) -> None:
        """Take the NPU of this rank, join the distributed group and build the model runner.

        The worker's own method does the same for a device of type ``cuda``.

        Raises:
            RuntimeError: There are fewer NPUs than ranks on this machine.
        """
        ledger.apply_all()
        self.local_rank += self._first_local_rank()
        count = torch.npu.device_count()
        if self.local_rank >= count:
            raise RuntimeError(
                f"Rank {self.local_rank} of this machine has no NPU: {count} are visible "
                f"({current_platform.device_control_env_var} says which)."
            )
        self.device = torch.device(DEVICE, self.local_rank)
        current_platform.set_device(self.device)
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        gc.collect()
        torch.accelerator.empty_cache()
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)
        init_workspace_manager(self.device, 2 if self.parallel_config.enable_dbo else 1)
        self.model_runner = AscendModelRunnerFL(self.vllm_config, self.device)
        if self.rank == 0:
            report_usage_stats(self.vllm_config)

    def _first_local_rank(self) -> int:
        """Return the first rank of this data-parallel replica on this machine."""
        parallel = self.parallel_config
        if (
            parallel.distributed_executor_backend in ("ray", "external_launcher")
            or parallel.data_parallel_backend == "ray"
            or parallel.nnodes_within_dp > 1
        ):
            return 0
        replica = parallel.data_parallel_rank_local
        if replica is None:
            replica = parallel.data_parallel_index
        ranks = parallel.pipeline_parallel_size * parallel.tensor_parallel_size
        first: int = replica * ranks
        return first

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        """Return no pool: vLLM asks out-of-tree platforms for a CuMem one."""
        return nullcontext()
