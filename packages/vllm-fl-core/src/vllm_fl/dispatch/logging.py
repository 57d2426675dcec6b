"""Loggers of vllm-fl: one level for all, and messages that are worth saying once."""

from __future__ import annotations

import functools
import logging
import os
import sys

from vllm_fl.dispatch import env
from vllm_fl.dispatch.errors import ConfigError

ROOT = "vllm_fl"


class _ProcessFormatter(logging.Formatter):
    """vLLM's own line layout, with the process, since vLLM runs several."""

    def __init__(self) -> None:
        super().__init__(
            "%(levelname)s %(asctime)s [%(name)s pid=%(process)d] %(message)s", "%m-%d %H:%M:%S"
        )


@functools.cache
def _configure(process: int) -> None:
    root = logging.getLogger(ROOT)
    try:
        root.setLevel(env.LOG_LEVEL.read())
    except ConfigError:  # said when the configuration is read; loggers are made before that
        root.setLevel(env.LOG_LEVEL.default)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_ProcessFormatter())
        root.addHandler(handler)
        root.propagate = False


def get_logger(name: str = "vllm_fl.dispatch") -> logging.Logger:
    """Return a logger under ``vllm_fl``; the first call in a process sets its level and handler."""
    _configure(os.getpid())
    return logging.getLogger(name)


def set_log_level(level: str | int, name: str = ROOT) -> None:
    """Set the level of ``name`` and what is below it."""
    get_logger(name).setLevel(level)
