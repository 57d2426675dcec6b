"""What is timed beside ours; each function returns a callable or raises what it lacks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from benchmarks.kernels.operator import Call


@cache
def load_vllm() -> None:
    """Load vLLM's CUDA kernels.

    Raises:
        ImportError: a library with kernels is missing or does not load.
    """
    importlib.import_module("vllm._custom_ops")
    failures = []
    for module in ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        try:  # which of them there are depends on vLLM's version
            importlib.import_module(module)
        except ImportError as error:
            failures.append(f"{module}: {error}")
    if not hasattr(torch.ops._C, "rms_norm"):
        raise ImportError("; ".join(failures))


def vllm(call: Call) -> Callable[[], Call]:
    """Make a candidate of a function that calls vLLM's kernels."""

    def load() -> Call:
        load_vllm()
        return call

    return load


def flag_gems(call: Call) -> Callable[[], Call]:
    """Make a candidate of a function (flag_gems, arguments) -> results."""

    def load() -> Call:
        package: Any = importlib.import_module("flag_gems")
        return partial(call, package)

    return load


def inductor(plain: Call) -> Callable[[], Call]:
    """Make a candidate of the formula as Inductor compiles it, anew for each shape."""

    def load() -> Call:
        torch.compiler.reset()
        return torch.compile(plain, dynamic=False, fullgraph=True)

    return load
