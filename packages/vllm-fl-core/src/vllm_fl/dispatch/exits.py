"""Running something when a process ends, in vLLM's own processes, too."""

from __future__ import annotations

import weakref
from collections.abc import Callable


def at_exit(method: Callable[[], None]) -> None:
    """Call a bound method, held weakly, when this process ends.

    Processes that multiprocessing started run its finalizers, and not atexit's functions.
    """
    from multiprocessing.util import Finalize  # slow to import

    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    Finalize(None, call, exitpriority=100)
