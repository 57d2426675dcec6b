"""Which kernels Triton has compiled in this process, and whose functions they are made of."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

_COMPILED_GRAPHS = "torch._inductor.runtime.compile_tasks."
"""Starts the names of the modules that Inductor writes."""


def triton_kernels() -> dict[str, list[str]]:
    """Return kernel name -> the modules whose functions have been compiled to one of this name.

    A module is named from the outermost package that its file lies in. A compiled graph holds
    copies of the functions that it calls, in modules of Inductor's: a copy counts for the function
    with the same text, else for all functions with the same name, else for itself.
    """
    jit, compiler = (
        sys.modules.get("triton.runtime.jit"),
        sys.modules.get("triton.compiler.compiler"),
    )
    if jit is None or compiler is None:
        return {}
    alive = _alive((jit.JITFunction, compiler.CompiledKernel))
    functions = [thing for thing in alive if isinstance(thing, jit.JITFunction)]
    compiled = [
        (kernel.name, kernel.src.fn)
        for kernel in alive
        # What has been compiled from text in Triton's intermediate language has no function.
        if isinstance(kernel, compiler.CompiledKernel) and getattr(kernel.src, "fn", None)
    ]
    # Inductor may launch the binary itself and drop the compiled kernel; it keeps the copy.
    compiled += [(copy.__name__, copy) for copy in functions if _is_copy(copy)]
    originals: dict[str, list[Any]] = defaultdict(list)
    for function in functions:
        if not _is_copy(function):
            originals[function.__name__].append(function)
    modules: dict[str, set[str]] = defaultdict(set)
    for name, function in compiled:
        sources = _copied(function, originals[name]) if _is_copy(function) else [function]
        modules[name].update(source.__module__ for source in sources)
    return {name: sorted({home(module) for module in found}) for name, found in modules.items()}


def _alive(kinds: tuple[type, ...]) -> list[Any]:
    """Return every instance, those included that vLLM has hidden from the garbage collector."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    # isinstance() would ask, and so wake, proxies.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]
    if frozen:
        gc.freeze()
    return found


def _is_copy(function: Any) -> bool:
    return str(function.__module__).startswith(_COMPILED_GRAPHS)


def _copied(copy: Any, candidates: list[Any]) -> list[Any]:
    same = [function for function in candidates if function.src.strip() == copy.src.strip()]
    return same or candidates or [copy]


def home(module: str) -> str:
    """Return a module's name from the outermost package that its file lies in.

    A package may put a folder of its own on the path and import by shorter names: flag_gems'
    kernels for Hopper are in ``hopper.ops``.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module
    folder, names = Path(file).parent, [Path(file).stem]
    if names == ["__init__"]:
        names = []
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    full = ".".join(names)
    return full if full.endswith(f".{module}") else module
