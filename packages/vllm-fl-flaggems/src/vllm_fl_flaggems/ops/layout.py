"""Where the rows of a tensor lie in memory, as three numbers that a kernel computes with."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl_flaggems.kernels.interpreted import BFLOAT16_REFUSAL
from vllm_fl_flaggems.kernels.launch import INTERPRETED

Layout = tuple[int, int, int]


def row_layout(x: Tensor) -> Layout:
    """Return ``(inner, outer_stride, inner_stride)`` of the rows ``x[..., :]``.

    Row ``r`` starts at element ``r // inner * outer_stride + r % inner * inner_stride``.

    Raises:
        ValueError: the leading dimensions need more than two strides.
    """
    rank = x.dim()
    if rank == 2:
        return 1, x.stride(0), 0
    if rank == 1:
        return 1, 0, 0
    merged = _merged(x)
    if len(merged) == 1:
        return 1, merged[0][1], 0
    if len(merged) == 2:
        return merged[0][0], merged[1][1], merged[0][1]
    raise ValueError(f"strides {x.stride()} of shape {tuple(x.shape)} do not reduce to two")


def _merged(x: Tensor) -> list[tuple[int, int]]:
    """Return size and stride of the leading dimensions, innermost first, the mergeable merged.

    The size of dimension 0, the number of tokens, is not looked at: torch.compile would make it a
    guard.
    """
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True):
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (size * merged[-1][0], merged[-1][1])
        else:
            merged.append((size, stride))
    return merged


def overlaps(layout: Layout, width: int) -> bool:
    """Whether rows of ``width`` elements may share memory, the outer stride being the larger."""
    inner, outer_stride, inner_stride = layout
    if inner > 1 and inner_stride < width:
        return True
    return outer_stride < (inner - 1) * inner_stride + width


def refusal(x: Tensor) -> str:
    """Say why a kernel over rows does not take ``x``; "" if it does."""
    if x.is_cpu and not INTERPRETED:
        return "the tensor is on the CPU; Triton compiles for accelerators"
    if BFLOAT16_REFUSAL and x.dtype == torch.bfloat16:
        return BFLOAT16_REFUSAL
    if x.dim() == 0:
        return "the tensor has no dimension"
    if x.stride(-1) != 1:
        return f"the last dimension is not contiguous (stride {x.stride(-1)})"
    if x.dim() > 3 and len(_merged(x)) > 2:
        return f"the leading dimensions do not reduce to two strides (strides {tuple(x.stride())})"
    return ""
