"""vLLM 0.28 up to 0.32."""

from __future__ import annotations

from vllm.utils.torch_utils import available_cpu_count as available_cpus

from vllm_fl.integration.ledger import SAMPLER_WITHOUT_TRITON
from vllm_fl_reference.vllm_compat.common import PYTORCH_SLOT_MAPPING

__all__ = ["PATCHES", "available_cpus", "bind_kernels", "set_worker_threads"]

PATCHES = (PYTORCH_SLOT_MAPPING, SAMPLER_WITHOUT_TRITON)


def bind_kernels() -> None:
    """Put the PyTorch kernels in place; called when the model runner is built."""
    for patch in PATCHES:
        patch.apply()


def set_worker_threads(local_world_size: int) -> None:
    """Do nothing: this vLLM gives each worker process its share of the CPUs itself."""
