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

from packaging.version import Version

from vllm_fl.integration.versions import vllm_version

_ADAPTERS = {"0.26": "v0_26", "0.28": "v0_28"}
"""First vLLM version that an adapter serves; it serves all versions up to the next entry."""


class Adapter(Protocol):
    """The interface of an adapter module; the module's docstring says what each part is."""

    UnquantizedMethod: type[Any]

    def padding_mask(self, tokens: int) -> Any:
        """See above."""


def adapter_name(version: Version) -> str:
    """Return the name of the module that serves a supported vLLM version."""
    return [name for first, name in _ADAPTERS.items() if Version(first).release <= version.release][
        -1
    ]


@cache
def adapter() -> Adapter:
    """Return the adapter module for the installed vLLM."""
    return cast(Adapter, importlib.import_module(f"{__name__}.{adapter_name(vllm_version())}"))
