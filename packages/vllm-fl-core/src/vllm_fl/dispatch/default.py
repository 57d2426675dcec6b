"""The process's manager, and the functions that use it."""

from __future__ import annotations

import contextvars
import os
import threading
from typing import Any

from vllm_fl.dispatch import discovery, exits, state
from vllm_fl.dispatch.calls import Function
from vllm_fl.dispatch.handle import BoundOp
from vllm_fl.dispatch.manager import OpManager, live_managers

_default: OpManager | None = None
_lock = threading.Lock()
_scoped_policy = state.SCOPED.get
_shared: dict[str, BoundOp] = {}


def get_default_manager() -> OpManager:
    """Return the process's manager, made on first use."""
    global _default
    if _default is None:
        with _lock:
            if _default is None:
                _default = OpManager()
    return _default


def reset_default_manager() -> None:
    """Drop the process's manager and what discovery found; handles of the old one stay as is."""
    global _default
    with _lock:
        _default = None
    _shared.clear()
    discovery.clear_discovered_plugins()


def call_op(op_name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call an operator through the process's manager; see :meth:`OpManager.call`."""
    # The body of OpManager.call, to save a second frame and packing of the arguments.
    manager = _default or get_default_manager()
    try:
        fn = manager.functions[op_name] if _scoped_policy() is None else manager.enter(op_name)
    except KeyError:
        fn = manager.enter(op_name)
    try:
        return fn(*args, **kwargs) if kwargs else fn(*args)
    except Exception as error:
        return manager.recover(op_name, fn, state.get_policy(), error, args, kwargs)


def resolve_op(op_name: str) -> Function:
    """Return the chosen implementation of an operator as a plain function."""
    return get_default_manager().resolve(op_name)


def bind_op(op_name: str) -> BoundOp:
    """Return a live handle on an operator; layers hold one and call its ``fn``."""
    return get_default_manager().bind(op_name)


def shared_op(op_name: str) -> BoundOp:
    """Return the process's one live handle on an operator, bound when it is first asked for.

    For implementations that call other operators, which have no layer to hold handles. It follows
    the process-wide policy, whatever context it is asked for in.

    Raises:
        NoImplementationError: none may run; the message says why for each.
    """
    op = _shared.get(op_name)
    if op is None:
        op = _shared[op_name] = contextvars.Context().run(bind_op, op_name)
    return op


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    state.reinit_lock_after_fork()
    discovery.reinit_lock_after_fork()
    for manager in tuple(live_managers):
        manager.reinit_after_fork()
    exits.reinit_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
