"""Counts of calls, declines and fall-backs by operator and implementation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.types import OpImpl


class Counters:
    """Counts of one manager.

    Attributes:
        enabled: whether newly bound functions count their calls and declines.
        calls: (operator, implementation id) -> finished and failed calls.
        declines: (operator, implementation id) -> calls whose arguments it does not take.
        fallbacks: (operator, implementation id) -> calls that another implementation answered.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.calls: Counter[tuple[str, str]] = Counter()
        self.declines: Counter[tuple[str, str]] = Counter()
        self.fallbacks: Counter[tuple[str, str]] = Counter()

    def counted(self, impl: OpImpl, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn`` with its calls counted."""
        calls, key = self.calls, (impl.op_name, impl.impl_id)

        def count_and_call(*args: Any, **kwargs: Any) -> Any:
            calls[key] += 1
            return fn(*args, **kwargs)

        return count_and_call

    def declined(self, impl: OpImpl) -> None:
        """Count a call whose arguments an implementation does not take."""
        self.declines[impl.op_name, impl.impl_id] += 1

    def fell_back(self, op_name: str, impl_id: str) -> None:
        """Count a call that another implementation answered."""
        self.fallbacks[op_name, impl_id] += 1

    def reset(self) -> None:
        """Start again from zero."""
        for counts in (self.calls, self.declines, self.fallbacks):
            counts.clear()

    def report(self) -> None:
        """Log the counts, if there are any."""
        for (op_name, impl_id), calls in sorted(self.calls.items()):
            get_logger().info(
                "%s: %s ran %d times, declined %d, fell back %d", op_name, impl_id, calls,
                self.declines[op_name, impl_id], self.fallbacks[op_name, impl_id],
            )  # fmt: skip
