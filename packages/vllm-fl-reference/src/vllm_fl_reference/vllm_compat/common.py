"""What several vLLM versions share: ledger entries and the number of CPUs."""

from __future__ import annotations

import inspect
import os
from functools import partial

import torch

from vllm_fl.integration.ledger import Patch, slot_mapping
from vllm_fl_reference.kernels import compute_slot_mapping


def _shutdown_calls(function: str) -> bool:
    from vllm.distributed import parallel_state

    source = inspect.getsource(parallel_state.cleanup_dist_env_and_memory)
    return f"torch.accelerator.{function}(" in source


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
        has_effect=partial(_shutdown_calls, function),
    )
    for function, first_version in (("empty_cache", ">=0.26"), ("empty_host_cache", ">=0.28"))
    if hasattr(torch.accelerator, function)  # PyTorch 2.11 lacks the second
)
"""Applied in every process that has a configuration: the engine's own process shuts down too."""

PYTORCH_SLOT_MAPPING = slot_mapping(compute_slot_mapping)


def prepare_process() -> None:
    """Apply the patches that any process of an engine needs."""
    if not torch.accelerator.is_available():
        for patch in ACCELERATOR_CACHES:
            patch.apply()


def affinity_cpus() -> int:
    """Return the number of CPUs that this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
