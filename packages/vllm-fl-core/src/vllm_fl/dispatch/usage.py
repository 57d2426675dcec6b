"""Which implementations are in use, as noted by whoever binds, calls or builds with one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.phases import phase_name

if TYPE_CHECKING:
    from vllm_fl.dispatch.oplist import OpList
    from vllm_fl.dispatch.types import OpImpl


class Usage:
    """What one manager's implementations are used for. To ask which is chosen notes nothing.

    Attributes:
        impl_ids: operator, with its phase where phases differ -> ids of what was noted for it.
        unable: operator that is asked when the model is built -> implementation id -> why it cannot
            serve the model.
        oplist: the file of VLLM_FL_OPLIST; None for none.
    """

    def __init__(self) -> None:
        self.impl_ids: dict[str, set[str]] = {}
        self.unable: dict[str, dict[str, str]] = {}
        self.oplist: OpList | None = None
        self._serving: dict[str, dict[str, OpImpl]] = {}
        self._lock = threading.Lock()

    def note(self, impl: OpImpl, phase: str = "") -> None:
        """Note that an implementation is in use in a phase ("": in all), and put it on the list.

        Of an operator with phases the last one noted is what serves: such a one is asked when the
        model is built, and the first choice may have been passed over.
        """
        name = phase_name(impl.op_name, phase)
        with self._lock:
            self.impl_ids.setdefault(name, set()).add(impl.impl_id)
            if get_spec(impl.op_name).phases:
                serving = self._serving.setdefault(impl.op_name, {})
                if not phase or "" in serving:
                    serving.clear()
                serving[phase] = impl
        if self.oplist is not None:
            self.oplist.note(name, impl.impl_id)

    def serving(self, op_name: str) -> dict[str, OpImpl]:
        """Return phase -> implementation of an operator with phases, as :meth:`note` noted."""
        with self._lock:
            return dict(self._serving.get(op_name, {}))

    def reinit_lock_after_fork(self) -> None:
        """Replace the locks in a forked child, where their holders no longer run."""
        self._lock = threading.Lock()
        if self.oplist is not None:
            self.oplist.reinit_lock_after_fork()
