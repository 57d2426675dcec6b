"""The operators of the benchmark: one module a family, each with its ``OPERATORS``."""

from __future__ import annotations

from benchmarks.kernels.operator import Operator
from benchmarks.kernels.operators import activation, attention, norm, rotary

OPERATORS: dict[str, Operator] = {
    **norm.OPERATORS,
    **activation.OPERATORS,
    **rotary.OPERATORS,
    **attention.OPERATORS,
}
"""Operator -> how it is timed."""
