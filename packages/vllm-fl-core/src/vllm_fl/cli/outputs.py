"""Files that a command writes after long work: checked before it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from vllm_fl.dispatch.errors import ConfigError


def check_outputs(written: Mapping[str, Path], used: Mapping[str, Path]) -> None:
    """Refuse files that cannot be written, or that something else needs; make their folders.

    Args:
        written: option -> the file that it names.
        used: option -> another file that the command needs, which may not exist.

    Raises:
        ConfigError: one is not a file, its folder cannot be made or written to, or it is named
            twice.
    """
    taken = {path.resolve(): option for option, path in used.items()}
    for option, path in written.items():
        _check_output(option, path)
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise ConfigError(f"{option} and {other} are both {path}. Name another file.")


def _check_output(option: str, path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder. Name a file.")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{option} {path} is no ordinary file. Name another one.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Permissions do not say it all: of a superuser, of /proc, of what is mounted read-only.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            with path.open("a"):
                pass
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}.") from error
