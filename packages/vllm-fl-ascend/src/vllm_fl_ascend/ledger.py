"""The patch ledger: each attribute that a worker process on an NPU rebinds, and why.

torch_npu has ``torch_npu.contrib.transfer_to_npu``, which rebinds far more than is needed, among
it ``torch.cuda.is_available``; then vLLM and Triton would take the NPU for a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PAD_SLOT = -1


@dataclass(frozen=True)
class Patch:
    """One attribute to rebind.

    Attributes:
        target: ``package.module:attribute``; left alone where the module does not have it.
        replacement: the new value.
        why: why the old value cannot be used.
        until: what has to happen before the entry can be deleted.
    """

    target: str
    replacement: object
    why: str
    until: str

    def apply(self) -> None:
        """Rebind the attribute."""
        module, _, attribute = self.target.partition(":")
        owner = importlib.import_module(module)
        if hasattr(owner, attribute):
            setattr(owner, attribute, self.replacement)


STREAMS = ("Stream", "current_stream", "default_stream", "stream", "set_stream")
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
            until="the model runner asks torch.accelerator or the platform.",
        )
    yield Patch(
        "torch.cuda:Event",
        event_class(npu.Event),
        why="As for the streams; an NPU's event has no argument ``blocking``.",
        until="the model runner asks torch.accelerator or the platform.",
    )
    for name, counterpart in MEMORY.items():
        yield Patch(
            f"torch.accelerator:{name}",
            getattr(npu, counterpart),
            why="torch.accelerator asks allocators that torch registers itself, and torch_npu does "
            "not add its own.",
            until="torch_npu's allocator answers torch.accelerator.",
        )
    yield Patch(
        "vllm.v1.worker.block_table:_compute_slot_mapping_kernel",
        SlotMappingKernel(),
        why="The V1 block table launches a Triton kernel, and Triton has no compiler for an NPU "
        "without the vendor's fork.",
        until="vLLM 0.26 to 0.32 are no longer supported: 0.33 has register_kernels for this.",
    )
    yield Patch(
        "vllm.v1.sample.ops.topk_topp_sampler:HAS_TRITON",
        False,
        why="With a Triton that is installed, vLLM gives top-k and top-p to a Triton kernel.",
        until="vLLM lets the platform choose the implementation.",
    )


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
    num_tokens: int,
) -> None:
    """Write the cache slot of every token into ``slot_mapping``, without waiting for the device.

    Args:
        query_start_loc: ``[requests + 1]`` cumulative tokens of the requests.
        positions: ``[>= num_tokens]`` position of each token in its request.
        block_table: ``[>= requests, columns]`` block numbers.
        slot_mapping: ``[>= num_tokens]``, **written**; -1 past the last token.
        block_size: tokens in a block.
        num_tokens: how many tokens there are.
    """
    tokens = torch.arange(num_tokens, device=positions.device, dtype=query_start_loc.dtype)
    rows = torch.searchsorted(query_start_loc[1:].contiguous(), tokens, right=True)
    placed = positions[:num_tokens]
    columns = torch.div(placed, block_size, rounding_mode="floor")
    # Tokens past the last request's, which fill a batch up, have no row of their own.
    blocks = block_table[rows.clamp(max=block_table.shape[0] - 1), columns].to(torch.int64)
    slots = blocks * block_size + placed % block_size
    slot_mapping[:num_tokens] = torch.where(tokens < query_start_loc[-1], slots, PAD_SLOT)
    slot_mapping[num_tokens:].fill_(PAD_SLOT)


class SlotMappingKernel:
    """Has the launch syntax of the Triton kernel it replaces: ``kernel[grid](...)``."""

    def __getitem__(self, grid: tuple[int, ...]) -> SlotMappingKernel:
        return self

    def __call__(
        self,
        num_tokens: int,
        max_num_tokens: int,
        query_start_loc: Tensor,
        positions: Tensor,
        block_table: Tensor,
        block_table_stride: int,
        block_size: int,
        slot_mapping: Tensor,
        **constants: Any,
    ) -> None:
        """Write the slots; context parallelism, which the constants are for, is refused."""
        compute_slot_mapping(
            query_start_loc, positions, block_table, slot_mapping, block_size, num_tokens
        )
