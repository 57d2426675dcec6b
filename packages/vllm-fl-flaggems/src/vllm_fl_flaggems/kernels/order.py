"""fp32 values as int32 of the same order: what a reduction finds the largest of, infinities too.

Integers have no NaN that a maximum could lose, and a warp reduces 32 of them in one instruction.
"""

# ruff: noqa: ANN001, ANN201  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(1 << 31))
"""Below the key of every number and of -inf."""


@triton.jit
def to_key(x):
    """Return int32 keys in the order of fp32 values; -0.0 and 0.0 have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_key(key):
    """Return the fp32 values that have these keys."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
