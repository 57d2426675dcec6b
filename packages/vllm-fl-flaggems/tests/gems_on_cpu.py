"""The real flag_gems on a machine without an accelerator.

flag_gems asks torch.cuda for a device when it is imported. ``pretend_device`` answers for one that
does not exist. With ``interpret`` its kernels then run in Triton's interpreter on CPU tensors:
the dispatch key is CPU's, launchers and tuners are left out, and what the interpreter does not
have (libdevice, flag_gems' reinterpreted tensors) is put in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import os
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

CAPABILITY = (8, 0)


class NoDevice(contextlib.AbstractContextManager[None]):
    """``torch.cuda.device`` for a device that does not exist."""

    def __init__(self, device: object = None) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def pretend_device() -> None:
    """Answer what flag_gems asks of the device at import."""
    os.environ["GEMS_VENDOR"] = "nvidia"
    os.environ.setdefault("FLAGGEMS_DB_URL", "sqlite:///:memory:")
    properties = types.SimpleNamespace(
        name="none", major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=4,
        L2_cache_size=50 << 20, warp_size=32, total_memory=80 << 30,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "device": NoDevice,
        "_DeviceGuard": NoDevice,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "none",
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: properties,
        "is_current_stream_capturing": lambda: False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def interpret() -> None:
    """Import flag_gems with its kernels interpreted; call ``pretend_device`` before."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    import triton
    from triton.runtime import interpreter, jit
    from triton.runtime.interpreter import InterpretedFunction

    triton.autotune = lambda configs, key, **_: lambda kernel: FirstConfig(kernel, configs[0])
    launcher = types.ModuleType("flag_gems.utils.libentry")
    vars(launcher).update(
        libentry=lambda: lambda kernel: kernel,
        libtuner=lambda configs, key, **_: lambda kernel: FirstConfig(kernel, configs[0]),
        libcache={},
        LibEntry=object,
        LibTuner=object,
    )
    sys.modules[launcher.__name__] = launcher
    InterpretedFunction.cache_key = property(lambda self: _digest(self.fn))
    InterpretedFunction.src = property(lambda self: _source(self.fn))
    InterpretedFunction.__globals__ = property(lambda self: self.fn.__globals__)
    _replace_libdevice()
    compiled, jit.JITFunction = jit.JITFunction, InterpretedFunction
    try:
        import flag_gems
    finally:
        jit.JITFunction = compiled

    unwrap = interpreter._unwrap_tensor

    def unwrap_buffer(tensor: Any) -> Any:
        if type(tensor).__name__ != "StridedBuffer":
            return unwrap(tensor)
        base = tensor.unwrap().view(tensor.dtype)
        offset = base.storage_offset() + tensor.offset
        return torch.as_strided(base, tensor.size(), tensor.stride(), offset)

    interpreter._unwrap_tensor = unwrap_buffer
    flag_gems.device = flag_gems.runtime.device.name = "cpu"
    flag_gems.runtime.device.dispatch_key = "CPU"
    for name, module in list(sys.modules.items()):
        if name.startswith("flag_gems.") and getattr(module, "device", None) == "cuda":
            module.device = "cpu"


class FirstConfig:
    """A tuner that takes the first configuration."""

    def __init__(self, kernel: Any, config: Any) -> None:
        self.fn, self.config, self.arg_names = kernel, config, kernel.arg_names

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            options = {**self.config.kwargs, **kwargs}
            named = {**dict(zip(self.arg_names, args, strict=False)), **options}
            return self.fn[grid(named) if callable(grid) else grid](*args, **options)

        return launch


def _source(function: Callable[..., Any]) -> str:
    text = textwrap.dedent(inspect.getsource(function))
    return text[text.index("def ") :]


def _digest(function: Callable[..., Any]) -> str:
    name = f"{function.__module__}.{function.__qualname__}"
    return hashlib.sha256((name + _source(function)).encode()).hexdigest()


def _replace_libdevice() -> None:
    import triton.language as tl
    import triton.language.extra.cuda.libdevice as cuda_libdevice
    import triton.language.extra.libdevice as libdevice
    from triton.runtime.interpreter import TensorHandle

    def elementwise(compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Any, **_: Any) -> Any:
            values = compute(x.handle.data).astype(x.handle.data.dtype)
            return tl.tensor(TensorHandle(values, x.dtype), x.type)

        return call

    functions = {
        "tanh": np.tanh,
        "erf": np.vectorize(math.erf, otypes=[np.float64]),
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "exp": np.exp,
        "log": np.log,
    }
    for module in (libdevice, cuda_libdevice):
        for name, compute in functions.items():
            setattr(module, name, elementwise(compute))
