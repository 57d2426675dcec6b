"""What several vLLM versions share: ledger entries and the number of CPUs."""

from __future__ import annotations

import inspect
import os
from functools import partial
from typing import Any

import torch

from vllm_fl_reference.kernels import compute_slot_mapping
from vllm_fl_reference.vllm_compat.ledger import Patch


def _shutdown_calls(function: str) -> bool:
    from vllm.distributed import parallel_state

    source = inspect.getsource(parallel_state.cleanup_dist_env_and_memory)
    return f"torch.accelerator.{function}(" in source


def _sampler_asks_has_triton() -> bool:
    from vllm.v1.sample.ops import topk_topp_sampler

    return "HAS_TRITON" in inspect.getsource(topk_topp_sampler.apply_top_k_top_p)


def _block_table_has_module_kernel() -> bool:
    from vllm.v1.worker import block_table

    return hasattr(block_table, "_compute_slot_mapping_kernel")


class _SlotMappingKernel:
    """Has the launch syntax of the Triton kernel it replaces: ``kernel[grid](...)``."""

    def __getitem__(self, grid: tuple[int, ...]) -> _SlotMappingKernel:
        return self

    def __call__(
        self,
        num_tokens: int,
        max_num_tokens: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        block_table: torch.Tensor,
        block_table_stride: int,
        block_size: int,
        slot_mapping: torch.Tensor,
        **constants: Any,
    ) -> None:
        compute_slot_mapping(query_start_loc, positions, block_table, slot_mapping, block_size)


def _nothing_to_free() -> None:
    pass


ACCELERATOR_CACHES = tuple(
    Patch(
        target=f"torch.accelerator:{function}",
        replacement=_nothing_to_free,
        why="vLLM frees the accelerator's caches at shutdown on every platform except its own CPU "
        "platform; without an accelerator PyTorch raises, which ends the engine with a traceback.",
        versions=first_version,
        until="cleanup_dist_env_and_memory asks the platform, or PyTorch no longer raises.",
        needed=partial(_shutdown_calls, function),
    )
    for function, first_version in (("empty_cache", ">=0.26"), ("empty_host_cache", ">=0.28"))
    if hasattr(torch.accelerator, function)  # PyTorch 2.11 lacks the second
)
"""Applied in every process that has a configuration: the engine's own process shuts down too."""

SAMPLER_WITHOUT_TRITON = Patch(
    target="vllm.v1.sample.ops.topk_topp_sampler:HAS_TRITON",
    replacement=False,
    why="With Triton usable, or CUDA_VISIBLE_DEVICES empty, vLLM gives top-k/top-p of an "
    "out-of-tree platform to a Triton kernel, also for CPU tensors.",
    versions=">=0.26",
    until="vLLM lets the platform choose the top-k/top-p implementation.",
    needed=_sampler_asks_has_triton,
)

SLOT_MAPPING = Patch(
    target="vllm.v1.worker.block_table:_compute_slot_mapping_kernel",
    replacement=_SlotMappingKernel(),
    why="The V1 block table launches a Triton kernel; vLLM's own CPU replacement calls compiled "
    "code that only a CPU build of vLLM contains.",
    versions=">=0.26,<0.33",
    until="vLLM 0.26 and 0.28 are no longer supported: 0.33 has register_kernels for this.",
    needed=_block_table_has_module_kernel,
)


def prepare_process() -> None:
    """Applies the patches that any process of an engine needs."""
    if not torch.accelerator.is_available():
        for patch in ACCELERATOR_CACHES:
            patch.apply()


def affinity_cpus() -> int:
    """Returns the number of CPUs that this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
