"""The patch ledger: an attribute of vLLM or torch that a worker process rebinds, and why.

Here are also the entries that platforms without a Triton compiler share.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    ComputeSlots = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]


@dataclass(frozen=True)
class Patch:
    """One attribute to rebind.

    Attributes:
        target: ``package.module:attribute``.
        replacement: the new value.
        why: why the old value cannot be used.
        versions: which versions need it, of vLLM unless it says of what.
        until: what has to happen before the entry can be deleted.
        has_effect: tells whether what is installed looks at the attribute.
    """

    target: str
    replacement: object
    why: str
    versions: str
    until: str
    has_effect: Callable[[], bool] = lambda: True

    def is_needed(self) -> bool:
        """Whether what is installed has the attribute and looks at it."""
        owner, attribute = self._place()
        return hasattr(owner, attribute) and self.has_effect()

    def apply(self) -> None:
        """Rebind the attribute; nothing happens where there is none."""
        owner, attribute = self._place()
        if hasattr(owner, attribute):
            setattr(owner, attribute, self.replacement)

    def _place(self) -> tuple[object, str]:
        module, _, attribute = self.target.partition(":")
        return importlib.import_module(module), attribute


def _sampler_asks_has_triton() -> bool:
    from vllm.v1.sample.ops import topk_topp_sampler

    return "HAS_TRITON" in inspect.getsource(topk_topp_sampler.apply_top_k_top_p)


SAMPLER_WITHOUT_TRITON = Patch(
    target="vllm.v1.sample.ops.topk_topp_sampler:HAS_TRITON",
    replacement=False,
    why="With Triton usable, or CUDA_VISIBLE_DEVICES empty, vLLM gives top-k/top-p of an "
    "out-of-tree platform to a Triton kernel, also where Triton has no compiler for the device.",
    versions=">=0.26",
    until="vLLM lets the platform choose the top-k/top-p implementation.",
    has_effect=_sampler_asks_has_triton,
)


def slot_mapping(compute: ComputeSlots) -> Patch:
    """Return the entry that computes the cache slots of a step's tokens without Triton.

    Args:
        compute: takes query_start_loc ``[requests + 1]``; positions ``[tokens]``, those that fill
            a batch up included; block_table ``[>= requests, columns]``; slot_mapping
            ``[>= tokens]``, which it **writes** whole, -1 where there is no token of a request;
            and the tokens in a block.
    """
    return Patch(
        target="vllm.v1.worker.block_table:_compute_slot_mapping_kernel",
        replacement=_SlotMappingKernel(compute),
        why="The V1 block table launches a Triton kernel; vLLM's own CPU replacement calls "
        "compiled code that only a CPU build of vLLM contains.",
        versions=">=0.26,<0.33",
        until="vLLM 0.26 to 0.32 are no longer supported: 0.33 has register_kernels for this.",
    )


class _SlotMappingKernel:
    """Has the launch syntax of the Triton kernel it replaces: ``kernel[grid](...)``."""

    def __init__(self, compute: ComputeSlots) -> None:
        self._compute = compute

    def __getitem__(self, grid: tuple[int, ...]) -> _SlotMappingKernel:
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
        """Write the slots; the constants are for context parallelism, which platforms refuse."""
        tokens = positions[:num_tokens]
        self._compute(query_start_loc, tokens, block_table, slot_mapping, block_size)
