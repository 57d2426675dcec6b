"""Step 3: the registration, named by the entry point or by VLLM_FL_PLUGIN_MODULES."""

from __future__ import annotations

import functools

from vllm_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl
from vllm_fl_bolt.bolt import BoltBackend


def _bind_is_available(fn, is_available_fn):
    """Attach the availability check to an implementation."""

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    wrapper._is_available = is_available_fn
    return wrapper


def register_builtins(registry) -> None:
    """Register Bolt's operators."""
    backend = BoltBackend()
    registry.register_many(
        [
            OpImpl(
                op_name=op_name,
                impl_id="vendor.bolt",
                kind=BackendImplKind.VENDOR,
                fn=_bind_is_available(getattr(backend, op_name), backend.is_available),
                vendor="bolt",
                priority=BackendPriority.VENDOR,
            )
            for op_name in ("silu_and_mul", "rms_norm")
        ]
    )
