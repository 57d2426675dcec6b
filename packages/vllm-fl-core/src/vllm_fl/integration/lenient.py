"""What a backend may fail at, and vLLM go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_fl.dispatch import state
from vllm_fl.dispatch.errors import VllmFLError
from vllm_fl.dispatch.logging import get_logger

logger = get_logger("vllm_fl.integration")


@contextmanager
def lenient(failure: str) -> Iterator[None]:
    """Log what is raised inside, after the text ``failure``, and go on behind the block.

    Raises:
        VllmFLError: one is raised inside.
        Exception: any is, and the policy is strict.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, VllmFLError) or state.get_global_policy().strict:
            raise
        logger.warning("%s: %s: %s", failure, type(error).__name__, error)
