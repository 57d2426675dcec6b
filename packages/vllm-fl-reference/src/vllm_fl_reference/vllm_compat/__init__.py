"""What differs between the supported vLLM versions, one module per version.

Every adapter module has:

* ``PATCHES``: the attributes of vLLM that must be rebound in a worker process (the patch ledger);
* ``bind_kernels()``: puts the PyTorch kernels where vLLM launches Triton kernels;
* ``available_cpus()``: how many CPUs this process may use;
* ``set_worker_threads()``: sees to it that several worker processes share the CPUs.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import version
from typing import Protocol, cast

from packaging.version import Version

from vllm_fl_reference.vllm_compat.ledger import Patch

_ADAPTERS = {"0.26": "v0_26", "0.28": "v0_28", "0.33": "v0_33"}
"""First vLLM version that an adapter serves; it serves all versions up to the next entry."""


class Adapter(Protocol):
    """The interface of an adapter module; the module's docstring says what each part is."""

    PATCHES: tuple[Patch, ...]

    def bind_kernels(self) -> None:
        """See above."""

    def available_cpus(self) -> int:
        """See above."""

    def set_worker_threads(self, local_world_size: int) -> None:
        """See above."""


def adapter_name(vllm_version: str) -> str:
    """Returns the name of the adapter module that serves ``vllm_version``.

    Raises:
        RuntimeError: If the version is older than every supported one.
    """
    release = Version(Version(vllm_version).base_version)
    served = [name for first, name in _ADAPTERS.items() if Version(first) <= release]
    if not served:
        oldest = next(iter(_ADAPTERS))
        message = f"vLLM {vllm_version} is not supported: version {oldest} or newer is needed."
        raise RuntimeError(message)
    return served[-1]


@cache
def adapter() -> Adapter:
    """Returns the adapter module for the installed vLLM."""
    name = adapter_name(version("vllm"))
    return cast(Adapter, importlib.import_module(f"{__name__}.{name}"))
