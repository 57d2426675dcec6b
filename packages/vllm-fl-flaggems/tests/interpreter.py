"""Makes Triton's interpreter compute with bf16 as a GPU does.

The interpreter keeps a bf16 as the 16 bits of its pattern and computes with those as integers,
and its conversion from fp32 cuts bits off instead of rounding. Nothing of it raises. ``repair``
puts wrappers around the few methods of the interpreter through which every such operation goes:
they widen bf16 to fp32, compute, and round to nearest, ties to even. Reducing bf16 raises, as the
kernels reduce in fp32. ``repair`` also takes away most of the time that the interpreter spends on
calls between functions, and lets loops of Triton 3.6 end at tensors. Python's ``and`` and ``or``
on masks, of which the interpreter drops an operand, cannot be seen from here: ``test_sources.py``
refuses them in the kernels' source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    GridExecutor,
    InterpreterBuilder,
    ReduceScanOpInterface,
    TensorHandle,
)

from vllm_fl_flaggems.availability import triton_version

QUIET_NAN = 0x7FC0


def widen(bits: np.ndarray) -> np.ndarray:
    """Return the fp32 values of bf16 bit patterns."""
    return np.left_shift(bits.astype(np.uint32), 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Return the bit patterns of the bf16 nearest to the values, ties to even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    upper, lower = bits >> 16, bits & 0xFFFF
    up = (lower > 0x8000) | ((lower == 0x8000) & (upper % 2 == 1))
    return np.where(np.isnan(values), QUIET_NAN, upper + up).astype(np.uint16)


def is_bf16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def widened(handle: Any) -> Any:
    return TensorHandle(widen(handle.data), tl.float32) if is_bf16(handle) else handle


def elementwise(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method (self, operand, ..., operation)."""

    def call(self: Any, *args: Any) -> Any:
        operands, operation = args[:-1], args[-1]
        if not any(is_bf16(operand) for operand in operands):
            return method(self, *args)
        if operation in (np.bitwise_and, np.bitwise_or, np.bitwise_xor):
            return method(self, *args)
        wide = [widened(operand) for operand in operands]
        output = operation(*(operand.data for operand in wide))
        if output.dtype == np.bool_:
            return TensorHandle(output, tl.int1)
        return TensorHandle(narrow(output), tl.bfloat16)

    return call


def cast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``cast_impl(self, src, dst_type)``."""

    def call(self: Any, src: Any, dst_type: Any) -> Any:
        target = dst_type.scalar
        if is_bf16(src) == (target == tl.bfloat16):
            return method(self, src, dst_type)
        if is_bf16(src):
            wide = widened(src)
            return wide if target == tl.float32 else method(self, wide, dst_type)
        return TensorHandle(narrow(src.data.astype(np.float32)), tl.bfloat16)

    return call


def float_cast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``create_fp_to_fp(self, src, dst_type, rounding_mode)``."""

    def call(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if is_bf16(src) or dst_type.scalar == tl.bfloat16:
            return self.cast_impl(src, dst_type)
        return method(self, src, dst_type, rounding_mode)

    return call


def dot(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``create_dot(self, a, b, d, ...)``; products of bf16 are exact in fp32."""

    def call(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return method(self, widened(a), widened(b), d, *rest)

    return call


def reduction(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``apply`` of reductions and scans."""

    def call(self: Any, values: Any) -> Any:
        for value in values if isinstance(values, tuple) else (values,):
            if value.dtype.scalar == tl.bfloat16:
                raise TypeError("a reduction over bf16: convert to fp32 first")
        return method(self, values)

    return call


def patching_once(patch: Callable[..., Any], patched: set[int]) -> Callable[..., Any]:
    """Wrap ``_patch_lang``, which takes milliseconds before each call of one function by another.

    Within a launch a language module that has been patched once stays as it is.
    """

    def call(fn: Any) -> Any:
        modules = {id(m) for m in fn.__globals__.values() if m is tl or m is tl.core}
        if modules <= patched:
            return interpreter._LangPatchScope()  # with nothing to restore
        patched.update(modules)
        return patch(fn)

    return call


def indexing(patch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_patch_lang_tensor`` of Triton 3.6, whose bounds of ``range`` NumPy deprecates.

    A scalar is an array of one element there, of which ``int`` is deprecated since NumPy 1.25.
    Triton 3.7 takes the element out first.
    """

    def call(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return call


def launching(launch: Callable[..., Any], patched: set[int]) -> Callable[..., Any]:
    """Wrap ``GridExecutor.__call__``, at whose end the language is restored."""

    def call(*args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return launch(*args, **kwargs)
        finally:
            patched.clear()

    return call


def repair() -> None:
    """Put the wrappers in place, once a process."""
    if hasattr(interpreter, "vllm_fl_repaired"):
        return
    interpreter.vllm_fl_repaired = True
    np.seterr(all="ignore")  # lanes beyond a mask compute, too; a GPU does not warn of infinities
    for name, wrap in {
        "binary_op": elementwise,
        "unary_op": elementwise,
        "cast_impl": cast,
        "create_fp_to_fp": float_cast,
        "create_dot": dot,
    }.items():
        setattr(InterpreterBuilder, name, wrap(getattr(InterpreterBuilder, name)))
    if triton_version() == (3, 6):
        interpreter._patch_lang_tensor = indexing(interpreter._patch_lang_tensor)
    patched: set[int] = set()
    interpreter._patch_lang = patching_once(interpreter._patch_lang, patched)
    GridExecutor.__call__ = launching(GridExecutor.__call__, patched)
    ReduceScanOpInterface.apply = reduction(ReduceScanOpInterface.apply)
