"""Files that a command writes at its end: whether they can be is known at its beginning."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_fl.dispatch.errors import ConfigError


def check_output(option: str, path: Path) -> None:
    """Check that a file can be written; folders that are missing are made when it is.

    Raises:
        ConfigError: it cannot be.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name a file.")
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if there != path and not there.is_dir():
        raise ConfigError(f"{option} {path}: {there} is not a folder.")
    if not os.access(there, os.W_OK):
        raise ConfigError(f"{option} {path}: {there} cannot be written; name another place.")
