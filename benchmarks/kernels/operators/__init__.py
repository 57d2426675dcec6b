"""The operators of the benchmark: one module a family, each with its ``OPERATORS``."""

from __future__ import annotations

from benchmarks.kernels.operator import Operator
from benchmarks.kernels.operators import activation, attention, moe, norm, rotary

OPERATORS: dict[str, Operator] = {
    **norm.OPERATORS,
    **activation.OPERATORS,
    **rotary.OPERATORS,
    **moe.OPERATORS,
    **attention.OPERATORS,
}
"""Operator -> how it is timed."""
