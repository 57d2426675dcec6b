"""Whether an implementation takes the arguments of a call, decided before anything is launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_fl.dispatch.errors import PredicateError
from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.types import YES, Decision, OpImpl, load_object

Predicate = Callable[..., Decision]


def predicate(impl: OpImpl) -> Predicate | None:
    """Return what decides about a call from its arguments; None if the implementation takes all.

    What is returned raises ``PredicateError`` where ``supports`` raises.

    Raises:
        BackendLoadError: ``supports`` was given as text and cannot be imported.
        RegistrationError: ``supports`` does not fit the operator's signature.
    """
    supports = load_object(impl.supports) if isinstance(impl.supports, str) else impl.supports
    spec = get_spec(impl.op_name)
    checks: list[Callable[..., object]] = []
    if impl.dtypes is not None:
        checks.append(_dtype_check(impl.dtypes, next(iter(spec.signature.parameters))))
    if supports is not None:
        spec.check(supports, f"the predicate of {impl.impl_id} ({impl.wheel or 'by hand'})")
        checks.append(supports)
    if not checks:
        return None
    unnamed = "its predicate refuses these arguments"

    def decide(*args: Any, **kwargs: Any) -> Decision:
        for check in checks:
            try:
                answer = check(*args, **kwargs)
            except Exception as error:
                raise PredicateError(
                    f"its predicate raised {type(error).__name__}: {error}"
                ) from error
            if answer is not True:
                decision = Decision.of(answer, unnamed)
                if not decision.accepted:
                    return decision
        return YES

    return decide


def decision_about(
    decide: Predicate | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Decision:
    """Ask about a call that is not made now: what raises does not take it, and tells why."""
    try:
        return YES if decide is None else decide(*args, **kwargs)
    except PredicateError as error:
        return Decision.no(str(error))


def _dtype_check(names: tuple[str, ...], first: str) -> Callable[..., object]:
    """Return a check of the first argument's dtype against torch dtypes given by name."""
    import torch  # whoever binds an operator on tensors has it

    allowed = frozenset(getattr(torch, name) for name in names)
    listed = ", ".join(names)

    def check(*args: Any, **kwargs: Any) -> object:
        dtype = (args[0] if args else kwargs[first]).dtype
        if dtype in allowed:
            return True
        return f"dtype {str(dtype).removeprefix('torch.')} is not among {listed}"

    return check
