"""What the backend does when a worker process starts: flag_gems' ATen operators, if asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_fl.dispatch import state
from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.oplist import OpList
from vllm_fl.dispatch.types import Decision
from vllm_fl_flaggems.availability import batch_invariant, interpreted, triton_availability
from vllm_fl_flaggems.gems.aten import is_asked_for, names_aten_operators, select
from vllm_fl_flaggems.gems.mends import usable
from vllm_fl_flaggems.gems.source import installed

if TYPE_CHECKING:
    from vllm_fl_flaggems.gems.worker import Enabled

logger = get_logger("vllm_fl.flaggems")

OPLIST = Path("/tmp/flaggems_enable_oplist.txt")
"""Where the operator list is written when no variable names a file."""


def possible() -> Decision:
    """Say whether flag_gems can run ATen operators here, without importing it."""
    found = installed()
    if found is None:
        return Decision.no("flag_gems is not installed (pip install --no-deps flag-gems)")
    if batch_invariant():
        return Decision.no("VLLM_BATCH_INVARIANT is set, and flag_gems' products tune by the batch")
    triton = triton_availability()
    if not triton:
        return triton
    device = state.current_device().device
    if device is not None and device.name == "cpu" and not interpreted():
        return Decision.no("vLLM runs on the CPU here, flag_gems on accelerators")
    return usable(found)


def start(rank: int) -> None:
    """Enable what the policy selects, and put it on the operator list of rank 0.

    Args:
        rank: this process's rank among those that run the model.

    Raises:
        ConfigError: it cannot be had, and the user has named an operator or set strict.
    """
    policy = state.get_global_policy()
    if not is_asked_for(state.current_config(), policy):
        return
    found = installed()
    decision = possible()
    if found is not None and decision:
        from vllm_fl_flaggems.gems import worker

        selection = select(found, policy)
        try:
            enabled = worker.enable(found, selection)
        except worker.Unavailable as error:
            decision = Decision.no(str(error))
        else:
            if rank == 0:
                _report(found.version, enabled)
            return
    text = f"PyTorch's own ATen operators run, not flag_gems': {decision.reason}."
    if policy.strict or names_aten_operators(policy):
        raise ConfigError(text)
    if rank == 0:
        logger.warning("%s", text)


def _report(version: str, enabled: Enabled) -> None:
    for key, reason in sorted(enabled.refused.items()):
        logger.info("flag_gems' %s is not enabled: %s.", key, reason)
    usage = get_default_manager().usage
    if usage.oplist is None:
        usage.oplist = OpList(OPLIST)
    logger.info(
        "flag_gems %s runs %d ATen operators; they are listed in %s.",
        version, len(enabled.functions), usage.oplist.path,
    )  # fmt: skip
    usage.oplist.add(
        f"[DEBUG] {function.__module__}.{function.__name__}: aten::{key}"
        for key, function in sorted(enabled.functions.items())
    )
