"""What the kernels need of a tensor, for the predicates. Metadata only, so that it traces."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DEVICE = "cuda"
"""torch's type of the device that the kernels run on."""


def is_aligned(x: Tensor, length: int, vector_bytes: int = 16) -> bool:
    """Whether vector accesses to ``x`` are aligned.

    The kernels take the widest vector of up to ``vector_bytes`` that divides the ``length`` of a
    row, without looking at addresses. A tracer knows no addresses, so that compiled code relies,
    as vLLM does, on tensors that start where the allocator or a row puts them.
    """
    width = math.gcd(vector_bytes // x.element_size(), length)
    if any(stride % width for stride in x.stride()[:-1]):
        return False
    return torch.compiler.is_compiling() or x.data_ptr() % (width * x.element_size()) == 0


def is_elsewhere(x: Tensor) -> bool:
    """Whether ``x`` is not on a CUDA device."""
    return x.device.type != DEVICE


def fits_32_bits(x: Tensor) -> bool:
    """Whether every element's offset fits the 32-bit arithmetic of a kernel."""
    return x.numel() < 2**31
