"""Recording in a worker: kernel name -> how often and how long, by torch.profiler."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from vllm_fl.profiling.triton_kernels import triton_kernels

_ACTIVITIES = {
    "cpu": ProfilerActivity.CPU,
    "cuda": ProfilerActivity.CUDA,
    "xpu": ProfilerActivity.XPU,
}


class Recorder:
    """Records from its creation until :meth:`stop`.

    Args:
        device: torch's type of the device whose time counts. On the CPU that is the time of each
            operator without the operators that it calls.
    """

    def __init__(self, device: str) -> None:
        self._on_cpu = device == "cpu"
        activity = _ACTIVITIES.get(device, ProfilerActivity.PrivateUse1)
        _synchronize(device)
        self._device = device
        self._profile = profile(activities=[activity])
        self._profile.start()

    def stop(self) -> dict[str, Any]:
        """Return ``kernels``: (name, calls, microseconds) each, and ``triton``: name -> modules."""
        _synchronize(self._device)
        self._profile.stop()
        kernels = []
        for event in self._profile.key_averages():
            on_cpu = event.device_type == torch.autograd.DeviceType.CPU
            if on_cpu != self._on_cpu or event.is_user_annotation:
                continue
            spent = event.self_cpu_time_total if on_cpu else event.self_device_time_total
            if spent > 0:
                kernels.append((event.key, event.count, float(spent)))
        return {"kernels": kernels, "triton": triton_kernels()}


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()
