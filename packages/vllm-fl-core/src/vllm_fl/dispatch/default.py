"""The process's manager, and the functions that use it."""

from __future__ import annotations

import os
import threading
from typing import Any

from vllm_fl.dispatch import discovery, state
from vllm_fl.dispatch.calls import Function
from vllm_fl.dispatch.handle import BoundOp
from vllm_fl.dispatch.manager import OpManager, live_managers

_default: OpManager | None = None
_lock = threading.Lock()
_scoped_policy = state.SCOPED.get


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
    discovery.clear_discovered_plugins()


def call_op(op_name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call an operator through the process's manager; see :meth:`OpManager.call`."""
    # The body of OpManager.call, to save a second frame and packing of the arguments.
    manager = _default or get_default_manager()
    try:
        fn = manager.functions[op_name] if _scoped_policy() is None else manager.resolve(op_name)
    except KeyError:
        fn = manager.resolve(op_name)
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


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    state.reinit_lock_after_fork()
    discovery.reinit_lock_after_fork()
    for manager in tuple(live_managers):
        manager.reinit_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
