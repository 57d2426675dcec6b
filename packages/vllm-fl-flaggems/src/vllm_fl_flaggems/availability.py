"""Whether Triton kernels can run on this machine, found out without importing Triton or torch.

No device is initialised: a process that has touched CUDA cannot fork workers any more.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from pathlib import Path

from vllm_fl.dispatch import state
from vllm_fl.dispatch.types import YES, Decision

OLDEST, NEWEST = (3, 6), (3, 9)
"""The first and the last (major, minor) version of Triton that the kernels are tested with."""

DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")
"""Where the devices that Triton's own wheel compiles for show (NVIDIA, the same in WSL, AMD)."""


def triton_availability() -> Decision:
    """Say whether Triton is here, in a version the kernels are for, with something to run on."""
    version = triton_version()
    if version is None:
        return Decision.no("triton is not installed")
    if not OLDEST <= version <= NEWEST:
        tested = " to ".join(".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        return Decision.no(f"triton {'.'.join(map(str, version))} is installed, not {tested}")
    if interpreted():
        return YES
    return _has_accelerator()


def triton_version() -> tuple[int, int] | None:
    """Return (major, minor) of the installed Triton, or None.

    Read off the package's source: the distribution has other names on other devices.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).read_text(encoding="utf-8")
    found = re.search(r"""^__version__\s*=\s*["'](\d+)\.(\d+)""", source, re.MULTILINE)
    return None if found is None else (int(found[1]), int(found[2]))


def interpreted() -> bool:
    """Whether Triton will run kernels on the CPU (Triton's own variable TRITON_INTERPRET)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def batch_invariant() -> bool:
    """Whether no result may depend on the batch (vLLM's own variable VLLM_BATCH_INVARIANT)."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0"


def _has_accelerator() -> Decision:
    """Say whether this machine has a device other than the CPU.

    The wheel that brings the device is asked first: it knows its own, whoever the vendor is.
    Without such a wheel, the device files of what Triton's own wheel compiles for are looked at.
    """
    device = state.current_device().device
    if device is not None and device.name != "cpu":
        return YES
    if any(glob.glob(pattern) for pattern in DEVICE_FILES):
        return YES
    return Decision.no(
        "no device for Triton: no installed backend brings an accelerator that this machine has, "
        f"and there is none of {', '.join(DEVICE_FILES)} (TRITON_INTERPRET=1 runs the "
        "kernels on the CPU)"
    )
