"""Which implementations can run on this machine at all: each backend is asked once."""

from __future__ import annotations

from collections.abc import Hashable

from vllm_fl.dispatch.types import Decision, OpImpl


class Availability:
    """The answers of one manager's backends, until they are forgotten."""

    def __init__(self) -> None:
        self._answers: dict[object, Decision] = {}

    def of(self, impl: OpImpl) -> Decision:
        """Return whether an implementation can run here; operators that share a check share it."""
        probe: object = impl.available
        if probe is None or not isinstance(probe, Hashable):
            probe = (impl.op_name, impl.impl_id)
        answers = self._answers  # what is asked now is not kept beyond a change
        if probe not in answers:
            answers[probe] = impl.availability()
        return answers[probe]

    def forget(self) -> None:
        """Ask again from now on."""
        self._answers = {}
