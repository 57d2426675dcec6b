"""Declaring the operators under the vendor's schemas."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FOLDER = Path(__file__).with_name("schemas")
_AVAILABLE = sorted(path.stem for path in _FOLDER.glob("*.json"))
_RELEASE = torch.__version__.split("+")[0]

VERSION = os.environ.get("EMULATED_TORCH_NPU") or (
    _RELEASE if _RELEASE in _AVAILABLE else _AVAILABLE[-1]
)
"""The version whose schemas are used: the named one, that of torch, or the newest."""

SCHEMAS: dict[str, str] = json.loads((_FOLDER / f"{VERSION}.json").read_text())["schemas"]
LIBRARY = torch.library.Library("npu", "DEF")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

for _schema in SCHEMAS.values():
    LIBRARY.define(_schema)


class Refused(RuntimeError):
    """A call that the vendor's documentation does not allow."""


def require(condition: bool, text: str) -> None:
    """Refuse the call unless ``condition`` holds."""
    if not condition:
        raise Refused(text)


def require_floats(operator: str, *tensors: Tensor | None) -> None:
    """Refuse tensors that are not fp16, bf16 or fp32, or not all of one dtype."""
    dtypes = {x.dtype for x in tensors if x is not None}
    require(len(dtypes) == 1, f"{operator}: the dtypes differ: {dtypes}")
    require(dtypes <= set(FLOATS), f"{operator}: {dtypes} is not supported")


def kernel(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Implement the operator of the function's name.

    Args:
        fake: what a tracer calls: the same arguments -> empty results.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        LIBRARY.impl(name, function, "CPU")
        torch.library.register_fake(f"npu::{name}", fake, lib=LIBRARY)
        return function

    return register
