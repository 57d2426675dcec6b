"""From a kernel's name to what it computes and where it comes from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_fl.dispatch.discovery import DiscoveredBackend

PYTORCH, INDUCTOR, RUNTIME, OTHER = "PyTorch", "Inductor", "runtime", "other"
TRITON_MODULE = "triton:"
"""Starts a glob that is matched against the module of a Triton kernel, not against a name."""

GENERAL: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "Memcpy *": ("copy of memory", RUNTIME),
        "Memset *": ("copy of memory", RUNTIME),
        # Inductor's kinds: pointwise, reductions, templates, foreach, split scans.
        **{f"triton_{kind}_*": ("fused by Inductor", INDUCTOR)
           for kind in ("poi", "red", "per", "mix", "tem", "for", "spl", "mm", "bmm")},
        "*at::native::*": ("", PYTORCH),
        "aten::*": ("", PYTORCH),
        **{f"aten::{name}": ("matrix product", PYTORCH)
           for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")},
        "aten::_scaled_dot_product_*": ("attention", PYTORCH),
        "c10d::*": ("communication between processes", PYTORCH),
        "gloo:*": ("communication between processes", "gloo"),
        "vllm::*": ("", "vLLM"),
        "vllm_fl::*": ("", "vllm-fl"),
        "triton:vllm.*": ("", "vLLM Triton"),
        "triton:torch.*": ("", "PyTorch Triton"),
    }
)  # fmt: skip
"""Names that do not depend on a vendor: of PyTorch, of Inductor, and of custom operators."""


@dataclass(frozen=True)
class Kernel:
    """What is known about a kernel.

    Attributes:
        op: what it computes, or its own name.
        origin: where its code comes from.
        triton: whether Triton compiled it.
    """

    op: str
    origin: str
    triton: bool


def patterns_of(backends: Iterable[DiscoveredBackend]) -> dict[str, tuple[str, str]]:
    """Return the general table with what each installed backend adds to it."""
    table = dict(GENERAL)
    for record in backends:
        if record.backend is not None:
            table.update(record.backend.kernels)
    return table


def classify(
    name: str, patterns: Mapping[str, tuple[str, str]], modules: Mapping[str, list[str]]
) -> Kernel:
    """Classify one kernel.

    Args:
        name: as torch.profiler shows it: a demangled C++ function, a Triton function, or an
            operator such as ``aten::mm``.
        patterns: see :attr:`vllm_fl.dispatch.backend.Backend.kernels`.
        modules: kernel that Triton has compiled -> the modules of its function, several where
            several compiled functions have that name. Where they are known, globs over names do
            not count, but for Inductor's on what Inductor has written.
    """
    by_name = _longest(name, patterns)
    homes = modules.get(name, [])
    made_by_inductor = by_name is not None and by_name[1] == INDUCTOR
    if homes and not (made_by_inductor and all(home.startswith("torch.") for home in homes)):
        known = [_longest(TRITON_MODULE + home, patterns) for home in homes]
        origins = {
            entry[1] if entry else home.partition(".")[0]
            for home, entry in zip(homes, known, strict=True)
        }
        ops = {entry[0] if entry else "" for entry in known}
        op = ops.pop() if len(ops) == 1 else ""
        return Kernel(op or name, " or ".join(sorted(origins)), True)
    if by_name is not None:
        op, origin = by_name
        return Kernel(op or short_name(name), origin, made_by_inductor)
    return Kernel(short_name(name), OTHER, False)


def _longest(name: str, patterns: Mapping[str, tuple[str, str]]) -> tuple[str, str] | None:
    """Return the entry of the longest glob that matches, of equals the first in the alphabet."""
    fitting = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
    return patterns[min(fitting, key=lambda p: (-len(p), p))] if fitting else None


def short_name(name: str) -> str:
    """Return a C++ function's name without return type, template arguments and parameters."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("aten::")
    while True:
        shorter = re.sub(r"<[^<>]*>|\([^()]*\)", "", plain)
        if shorter == plain:
            break
        plain = shorter
    words = plain.split(" [clone")[0].split()
    return words[-1] if words else name
