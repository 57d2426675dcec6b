"""Running something when a process ends, in vLLM's own processes, too, and in forked ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable

_methods: list[weakref.WeakMethod[Callable[[], None]]] = []


def at_exit(method: Callable[[], None]) -> None:
    """Call a bound method, held weakly, when this process ends, and when one forked from it does.

    Processes that multiprocessing started run its finalizers, and not atexit's functions.
    """
    from multiprocessing.util import register_after_fork  # slow to import

    if not _methods:
        register_after_fork(_call_all, _finalize)
        _finalize(_call_all)
    _methods.append(weakref.WeakMethod(method))


def reinit_after_fork() -> None:
    """Register again in a forked child, which runs no finalizer of its parent.

    One that multiprocessing forked drops this, too, and registers when it has dropped everything.
    """
    if _methods:
        _finalize(_call_all)


def _finalize(call: Callable[[], None]) -> None:
    from multiprocessing.util import Finalize

    Finalize(None, call, exitpriority=100)


def _call_all() -> None:
    for reference in _methods:
        alive = reference()
        if alive is not None:
            alive()
