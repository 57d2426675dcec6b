"""What differs between the supported vLLM versions on the core's side, one module per version.

Every adapter module has:

* ``UnquantizedMethod``: vLLM's method for mixture-of-experts layers without quantisation, made fit
  for a platform that gives it no modular kernel;
* ``padding_mask(tokens)``: which rows of a batch only pad it and need no experts, or None.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Protocol, cast

from vllm_fl.integration.versions import adapter_module, vllm_version

ADAPTERS = {"0.26": "v0_26", "0.28": "v0_28"}
"""First vLLM version that a module serves -> the module."""


class Adapter(Protocol):
    """The interface of an adapter module; the module's docstring says what each part is."""

    UnquantizedMethod: type[Any]

    def padding_mask(self, tokens: int) -> Any:
        """See above."""


@cache
def adapter() -> Adapter:
    """Return the adapter module for the installed vLLM."""
    name = adapter_module(ADAPTERS, vllm_version())
    return cast(Adapter, importlib.import_module(f"{__name__}.{name}"))
