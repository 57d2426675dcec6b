"""Whether an implementation takes the arguments of a call, decided before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_fl.dispatch.types import YES, Decision, OpImpl, load_object

Predicate = Callable[..., Decision]


def predicate(impl: OpImpl) -> Predicate | None:
    """Return what decides about a call from its arguments; None if the implementation takes all.

    Raises:
        BackendLoadError: ``supports`` was given as text and cannot be imported.
    """
    supports = load_object(impl.supports) if isinstance(impl.supports, str) else impl.supports
    checks: list[Callable[..., object]] = []
    if impl.dtypes is not None:
        checks.append(_dtype_check(impl.dtypes))
    if supports is not None:
        checks.append(supports)
    if not checks:
        return None
    unnamed = "its predicate refuses these arguments"

    def decide(*args: Any, **kwargs: Any) -> Decision:
        for check in checks:
            answer = check(*args, **kwargs)
            if answer is not True:
                decision = Decision.of(answer, unnamed)
                if not decision.accepted:
                    return decision
        return YES

    return decide


def _dtype_check(names: tuple[str, ...]) -> Callable[..., object]:
    """Return a check of the first argument's dtype against torch dtypes given by name."""
    import torch  # whoever binds an operator on tensors has it

    allowed = frozenset(getattr(torch, name) for name in names)
    listed = ", ".join(names)

    def check(first: Any, *args: Any, **kwargs: Any) -> object:
        if first.dtype in allowed:
            return True
        return f"dtype {str(first.dtype).removeprefix('torch.')} is not among {listed}"

    return check
