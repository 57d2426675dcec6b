"""What every launch has in common: whether kernels are interpreted, and overlap with neighbours.

On NVIDIA devices from Hopper on a kernel may be set up while the one before it still runs
(programmatic dependent launch): ``wait_for_inputs`` then waits for that one's results. It hides
most of the microsecond that a small kernel costs beyond its work, in a CUDA graph, too.
"""

# ruff: noqa: ANN001, ANN201  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER_SHARED = 227 * 1024

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in Triton's interpreter, on tensors of any device."""


@functools.cache
def launch_options() -> dict[str, bool]:
    """Return the keyword arguments of every launch; asks the driver once a process."""
    if INTERPRETED:
        return {"OVERLAP": False}
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "cuda" and target.arch >= 90:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@functools.cache
def register_limit(registers: int | None) -> dict[str, int]:
    """Return the keyword arguments that let a thread have no more than so many registers.

    Only Triton's backend for NVIDIA has such an option.
    """
    if registers is None or INTERPRETED:
        return {}
    target = triton.runtime.driver.active.get_current_target()
    return {"maxnreg": registers} if target.backend == "cuda" else {}


@functools.cache
def shared_memory() -> int:
    """Return how many bytes of shared memory a program can have; asks the driver once a process."""
    if INTERPRETED:
        return _HOPPER_SHARED
    driver = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(driver.get_current_device())
    return int(properties["max_shared_mem"])


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Stand before the first access to memory: wait for the kernel before, release the next."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def row_offset(row, inner, outer_stride, inner_stride):
    """Return, in 64 bits, how many elements lie before a row.

    Args:
        row: number of the row, int32 scalar or tensor.
        inner: rows are numbered ``outer * inner + inner_index``.
        outer_stride: elements from one outer index to the next.
        inner_stride: elements from one inner index to the next.
    """
    outer_part = (row // inner).to(tl.int64) * outer_stride
    return outer_part + (row % inner).to(tl.int64) * inner_stride
