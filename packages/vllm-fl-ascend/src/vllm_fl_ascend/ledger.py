"""The patch ledger: each attribute that a worker process on an NPU rebinds, and why.

torch_npu has ``torch_npu.contrib.transfer_to_npu``, which rebinds far more than is needed, among
it ``torch.cuda.is_available``; then vLLM and Triton would take the NPU for a GPU.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_fl.integration.ledger import SAMPLER_WITHOUT_TRITON, Patch, slot_mapping

PAD_SLOT = -1


STREAMS = ("Stream", "current_stream", "stream", "set_stream")
MEMORY = {
    "memory_stats": "memory_stats",
    "memory_reserved": "memory_reserved",
    "memory_allocated": "memory_allocated",
    "max_memory_allocated": "max_memory_allocated",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "get_memory_info": "mem_get_info",
    "empty_cache": "empty_cache",
}
"""Function of ``torch.accelerator`` -> that of ``torch.npu``."""
CALLERS = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.utils.torch_utils",
    "vllm.utils.mem_utils",
    "vllm.model_executor.model_loader.base_loader",
)
"""The modules of vLLM that run on an NPU and call what is rebound."""


def _is_called(name: str) -> bool:
    sources = (inspect.getsource(importlib.import_module(module)) for module in CALLERS)
    return any(f"{name}(" in source for source in sources)


def patches(npu: Any) -> Iterator[Patch]:
    """Yield every entry.

    Args:
        npu: the module ``torch.npu``.
    """
    for name in STREAMS:
        yield Patch(
            f"torch.cuda:{name}",
            getattr(npu, name),
            why="vLLM's V1 model runner asks torch.cuda for streams by name.",
            versions=">=0.26",
            until="the model runner asks torch.accelerator or the platform.",
            has_effect=partial(_is_called, f"torch.cuda.{name}"),
        )
    yield Patch(
        "torch.cuda:Event",
        event_class(npu.Event),
        why="As for the streams; an NPU's event has no argument ``blocking``.",
        versions=">=0.26",
        until="the model runner asks torch.accelerator or the platform.",
        has_effect=partial(_is_called, "torch.cuda.Event"),
    )
    for name, counterpart in MEMORY.items():
        yield Patch(
            f"torch.accelerator:{name}",
            getattr(npu, counterpart),
            why="torch.accelerator asks allocators that torch registers itself, and torch_npu does "
            "not add its own.",
            versions="torch_npu 2.11 and 2.13",
            until="torch_npu's allocator answers torch.accelerator.",
            has_effect=partial(_is_called, f"torch.accelerator.{name}"),
        )
    yield slot_mapping(compute_slot_mapping)
    yield SAMPLER_WITHOUT_TRITON


def apply_all() -> None:
    """Rebind everything, when a worker starts; doing it again changes nothing."""
    for patch in patches(torch.npu):
        patch.apply()


def event_class(event: Any) -> Callable[..., Any]:
    """Return what makes events as ``torch.cuda.Event`` does, of the class ``event``."""

    def make(*args: Any, blocking: bool = False, **kwargs: Any) -> Any:
        return event(*args, **kwargs)

    return make


def compute_slot_mapping(
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    block_size: int,
) -> None:
    """Write the cache slot of every token into ``slot_mapping``, without waiting for the device.

    Args:
        query_start_loc: ``[requests + 1]`` cumulative tokens of the requests.
        positions: ``[tokens]`` position of each token in its request.
        block_table: ``[>= requests, columns]`` block numbers.
        slot_mapping: ``[>= tokens]``, **written**; -1 past the last token.
        block_size: tokens in a block.
    """
    count = len(positions)
    tokens = torch.arange(count, device=positions.device, dtype=query_start_loc.dtype)
    rows = torch.searchsorted(query_start_loc[1:].contiguous(), tokens, right=True)
    columns = torch.div(positions, block_size, rounding_mode="floor")
    # Tokens past the last request's, which fill a batch up, have no row of their own.
    blocks = block_table[rows.clamp(max=block_table.shape[0] - 1), columns].to(torch.int64)
    slots = blocks * block_size + positions % block_size
    slot_mapping[:count] = torch.where(tokens < query_start_loc[-1], slots, PAD_SLOT)
    slot_mapping[count:].fill_(PAD_SLOT)
