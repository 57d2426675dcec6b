"""vLLM 0.26 and 0.27."""

from __future__ import annotations

import os

from vllm_fl.integration.ledger import SAMPLER_WITHOUT_TRITON
from vllm_fl_reference.vllm_compat.common import PYTORCH_SLOT_MAPPING, affinity_cpus

PATCHES = (PYTORCH_SLOT_MAPPING, SAMPLER_WITHOUT_TRITON)

available_cpus = affinity_cpus


def bind_kernels() -> None:
    """Put the PyTorch kernels in place; called when the model runner is built."""
    for patch in PATCHES:
        patch.apply()


def set_worker_threads(local_world_size: int) -> None:
    """Give each of several worker processes its share of the CPUs.

    This vLLM starts them with one thread each unless OMP_NUM_THREADS is set.
    """
    if local_world_size > 1:
        share = max(1, available_cpus() // local_world_size)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
