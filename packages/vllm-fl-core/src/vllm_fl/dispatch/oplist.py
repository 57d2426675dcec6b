"""The list of implementations in use, in a file, for people and scripts.

One line an operator and implementation, in the form of FlagGems' own operator list:
``[DEBUG] vllm_fl.dispatch.ops.<operator>: <implementation id>``. It is written when operators are
bound or first called, so it is complete in eager, compiled and graph modes alike.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_fl.dispatch.logging import get_logger

if TYPE_CHECKING:
    from pathlib import Path

logger = get_logger()


class OpList:
    """A file that always holds every implementation that has been bound in this process.

    Args:
        path: the file of rank 0; rank N writes ``path.rankN``.

    Attributes:
        rank: the rank of this process among those that run the model.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[str, None] = {}
        self._lock = threading.Lock()
        self.rank = 0

    @property
    def path(self) -> Path:
        """The file of this process."""
        if self.rank == 0:
            return self._path
        return self._path.with_name(f"{self._path.name}.rank{self.rank}")

    def note(self, op_name: str, impl_id: str) -> None:
        """Add an implementation; a new one is written at once."""
        self.add([f"[DEBUG] vllm_fl.dispatch.ops.{op_name}: {impl_id}"])

    def add(self, lines: Iterable[str]) -> None:
        """Add lines as they are; those that are new are written at once."""
        with self._lock:  # else an older list might replace a newer one
            new = [line for line in lines if line not in self._lines]
            if new:
                self._lines.update(dict.fromkeys(new))
                try:
                    write_atomically(self.path, "\n".join(self._lines) + "\n")
                except OSError as error:
                    logger.warning("The operator list %s cannot be written: %s", self.path, error)

    def reinit_lock_after_fork(self) -> None:
        """Replace the lock in a forked child, where its holder no longer runs."""
        self._lock = threading.Lock()


def write_atomically(path: Path, text: str) -> None:
    """Replace a file as a whole; a link in its place is replaced, not followed.

    Raises:
        OSError: the folder is missing or not writable, or the path is a folder.
    """
    import tempfile  # slow to import, and few write an operator list

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # as any other new file; mkstemp makes private ones
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
