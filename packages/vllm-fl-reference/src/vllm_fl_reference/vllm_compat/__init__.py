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
from typing import Protocol, cast

from vllm_fl.integration.ledger import Patch
from vllm_fl.integration.versions import adapter_module, vllm_version

ADAPTERS = {"0.26": "v0_26", "0.28": "v0_28", "0.33": "v0_33"}
"""First vLLM version that a module serves -> the module."""


class Adapter(Protocol):
    """The interface of an adapter module; the module's docstring says what each part is."""

    PATCHES: tuple[Patch, ...]

    def bind_kernels(self) -> None:
        """See above."""

    def available_cpus(self) -> int:
        """See above."""

    def set_worker_threads(self, local_world_size: int) -> None:
        """See above."""


@cache
def adapter() -> Adapter:
    """Return the adapter module for the installed vLLM."""
    name = adapter_module(ADAPTERS, vllm_version())
    return cast(Adapter, importlib.import_module(f"{__name__}.{name}"))
