"""vLLM's cache of rotary embeddings, of which a layer hands over the halves cos and sin.

Kernels that read the one cache ``[max_position, cos | sin]`` get it back from the halves.
"""

from __future__ import annotations

import torch
from torch import Tensor


def joint_cache(cos: Tensor) -> Tensor:
    """Return the cache of which ``cos`` is the left half, as a view."""
    positions, half = cos.shape
    return cos.as_strided((positions, 2 * half), (2 * half, 1))


def are_halves_of_one_cache(cos: Tensor, sin: Tensor) -> bool:
    """Whether ``cos, sin`` are what ``cache.chunk(2, dim=-1)`` returns."""
    half = cos.shape[1]
    strides = (2 * half, 1)
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        return False
    if cos.stride() != strides or sin.stride() != strides:
        return False
    if torch.compiler.is_compiling():  # a tracer knows no addresses; rows with such gaps are halves
        return True
    return sin.data_ptr() == cos.data_ptr() + half * cos.element_size()
