"""vLLM 0.33 and newer: Triton kernels are replaced through vLLM's own registry."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from vllm.triton_utils.dispatcher import register_kernels
from vllm.utils.torch_utils import available_cpu_count as available_cpus

from vllm_fl.integration.ledger import SAMPLER_WITHOUT_TRITON
from vllm_fl_reference.kernels import compute_slot_mapping

__all__ = ["PATCHES", "available_cpus", "bind_kernels", "set_worker_threads"]

PATCHES = (SAMPLER_WITHOUT_TRITON,)


def _slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    block_size: int,
    *constants: Any,
) -> None:
    compute_slot_mapping(query_start_loc, positions, block_table, slot_mapping, block_size)


KERNELS = {"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": _slot_mapping}


@cache  # a second engine in one process comes here again; registering twice logs a warning
def bind_kernels() -> None:
    """Put the PyTorch kernels in place; called before the worker is built."""
    register_kernels(KERNELS)
    for patch in PATCHES:
        patch.apply()


def set_worker_threads(local_world_size: int) -> None:
    """Do nothing: this vLLM gives each worker process its share of the CPUs itself."""
