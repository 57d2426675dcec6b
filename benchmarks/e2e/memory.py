"""Shares the device's memory among the engines that are alive together."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.e2e.models import token_bytes, weight_bytes
from benchmarks.e2e.workloads import CHECK, Workload

GIB = 1 << 30
OVERHEAD = 4 * GIB
"""What an engine takes beside weights and KV cache: context, activations, graphs."""
SPARE = GIB
"""Of the device, left to the driver."""


def device_bytes() -> int | None:
    """Return the memory of the first NVIDIA GPU; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    # Not through torch: the context that it makes would take memory of its own.
    query = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0")
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    return int(done.stdout) << 20


def share(
    config: Mapping[str, Any],
    workloads: Sequence[Workload],
    engines: int,
    device: int | None,
    live: int | None = None,
) -> tuple[int, int]:
    """Return how many engines are alive at a time, and the bytes of each one's KV cache.

    As many as fit with caches that hold all requests of every workload; two in any case, with
    caches that fit, where requests of the largest workload then wait for each other.

    Args:
        config: the model's.
        workloads: what will run.
        engines: how many would be alive at most.
        device: bytes of its memory; None if that does not matter.
        live: asked for, instead of what would fit.

    Raises:
        ValueError: not even the longest request fits.
    """
    all_workloads = (*workloads, CHECK)
    token = token_bytes(config)
    wanted = token * max(w.cached_tokens for w in all_workloads)
    if device is None:
        return live or engines, wanted
    fixed = weight_bytes(config) + OVERHEAD
    live = live or max(min(2, engines), min(engines, (device - SPARE) // (fixed + wanted)))
    cache = min(wanted, (device - SPARE) // live - fixed)
    least = token * max(w.request_tokens for w in all_workloads)
    if cache < least:
        raise ValueError(
            f"{live} engines with {fixed / GIB:.0f} GiB each, and {least / GIB:.1f} GiB for the "
            f"longest request, do not fit in {device / GIB:.0f} GiB: give fewer --layers, a "
            "smaller --live or shorter workloads"
        )
    return live, cache
