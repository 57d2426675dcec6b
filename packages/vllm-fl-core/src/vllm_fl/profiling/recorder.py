"""Recording in a worker: kernel name -> how often and how long, by torch.profiler."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

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
        return {"kernels": kernels, "triton": triton_functions()}


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def triton_functions() -> dict[str, list[str]]:
    """Return the Triton functions of this process: name -> modules that define one of this name.

    Where several do, those count that have been compiled here, if any has. Compiled graphs have
    copies of the functions that they call, in modules of Inductor's: these do not count.
    """
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        return {}
    found: dict[str, dict[str, int]] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), jit.JITFunction):  # isinstance() would ask, and so wake, proxies
            modules = found.setdefault(thing.__name__, {})
            module = thing.fn.__module__
            modules[module] = max(modules.get(module, 0), _standing(thing))
    return {
        name: sorted(m for m, standing in modules.items() if standing == max(modules.values()))
        for name, modules in found.items()
    }


def _standing(function: Any) -> int:
    """0 for a copy in a compiled graph, 2 if a launch of the function has compiled it, else 1."""
    if function.fn.__module__.startswith("torch._inductor."):
        return 0
    return 1 + any(bool(cache[0]) for cache in function.device_caches.values())
