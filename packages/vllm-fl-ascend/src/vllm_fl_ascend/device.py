"""The device that the operators run on, asked in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

DEVICE = "npu"
"""torch's type of the device: the name that torch_npu gives to PrivateUse1 when it is imported."""


def is_elsewhere(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors is on another device; those of `vllm-fl explain` are on none."""
    return any(x is not None and x.device.type not in (DEVICE, "meta") for x in tensors)
