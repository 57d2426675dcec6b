"""Which NVIDIA GPU this process would see, asked of the driver's management library.

NVML answers without initialising CUDA: a process that has touched CUDA cannot fork.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from vllm_fl.dispatch.types import YES, Decision

VISIBLE = "CUDA_VISIBLE_DEVICES"


def detect() -> Decision:
    """Whether vLLM and torch can use an NVIDIA GPU here, and why not."""
    build = _cuda_builds()
    if not build:
        return build
    found = _first_gpu(os.environ.get(VISIBLE))
    return found if isinstance(found, Decision) else YES


def arch() -> int | None:
    """Return the first visible GPU's compute capability as 10 * major + minor."""
    found = _first_gpu(os.environ.get(VISIBLE))
    return found if isinstance(found, int) else None


def _cuda_builds() -> Decision:
    """Whether the installed vLLM and torch are not builds for the CPU, by their versions."""
    for name in ("vllm", "torch"):
        try:
            installed = Version(version(name))
        except PackageNotFoundError:
            continue  # it comes from elsewhere, and its version says nothing
        if (installed.local or "").startswith("cpu"):
            return Decision.no(f"the installed {name} {installed} is a build for the CPU")
    return YES


@functools.cache
def _first_gpu(visible: str | None) -> int | Decision:
    """Return the compute capability of the first GPU that ``visible`` leaves, or why there is none.

    Args:
        visible: the value of CUDA_VISIBLE_DEVICES; None when it is not set.
    """
    first = None if visible is None else visible.split(",")[0].strip()
    if first in ("", "-1", "NoDevFiles"):
        return Decision.no(f"{VISIBLE}={visible!r} hides every GPU")
    try:
        import pynvml
    except ImportError:
        return Decision.no("the package nvidia-ml-py is not installed")
    try:
        with _nvml(pynvml):
            count = pynvml.nvmlDeviceGetCount()
            if count == 0:
                return Decision.no("the NVIDIA driver reports no GPU")
            handle = _handle(pynvml, first or "0", count)
            if handle is None:
                return Decision.no(f"{VISIBLE}={visible!r} names none of the {count} GPUs here")
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError as error:
        return Decision.no(f"NVML, the NVIDIA driver's library, says: {error}")
    return 10 * int(major) + int(minor)


@contextmanager
def _nvml(pynvml: Any) -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _handle(pynvml: Any, name: str, count: int) -> Any:
    """Return NVML's handle of a GPU as CUDA_VISIBLE_DEVICES names it; None if there is none.

    Names are an index, a UUID or its beginning, or the UUID of a MIG instance.
    """
    if name.startswith("MIG-"):
        return pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
            pynvml.nvmlDeviceGetHandleByUUID(name)
        )
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    if name.isdigit():
        return handles[int(name)] if int(name) < count else None
    return next((h for h in handles if pynvml.nvmlDeviceGetUUID(h).startswith(name)), None)
