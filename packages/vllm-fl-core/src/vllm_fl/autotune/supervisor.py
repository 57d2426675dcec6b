"""The tuner's end of an engine's process: commands with a time limit, and its death."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_fl.dispatch import env
from vllm_fl.dispatch.errors import VllmFLError


class TrialFailed(VllmFLError, RuntimeError):
    """An engine ended, hung, or answered with an error; the text says which and why."""


class EngineProcess:
    """A process of ``vllm_fl.autotune.engine``; it and its children form a process group.

    Args:
        log: a file for what it prints.
        unset: variables that it shall not see, besides those of tuned configurations: what is
            tuned is what runs without one.
    """

    def __init__(self, log: Path, unset: Iterable[env.EnvVar] = ()) -> None:
        read, write = os.pipe()
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s",
                 "-m", "vllm_fl.autotune.engine", str(write)],
                env=env.environ_without(env.TUNED_DIR, env.TUNED_FILE, *unset),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=(write,),
                start_new_session=True,
            )  # fmt: skip
        os.close(write)
        self._answers = os.fdopen(read)

    def ask(self, limit: float, do: str, **arguments: Any) -> Any:
        """Send a command and wait for its answer.

        Args:
            limit: seconds after which the process is killed.
            do: the command.
            arguments: its arguments.

        Raises:
            TrialFailed: it answered with an error, ended, or hung. In the last two cases it is
                gone.
        """
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and the log says why
            stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            stdin.flush()
        end = time.monotonic() + limit
        # The engine's children may keep the pipe open when the one that is asked has ended.
        while not select.select([self._answers], [], [], 0.5)[0]:
            if self._process.poll() is not None:
                break
            if time.monotonic() > end:
                self.kill()
                raise TrialFailed(f"{do} took longer than {limit:.0f} s")
        answer = self._answers.readline() if select.select([self._answers], [], [], 0)[0] else ""
        if not answer:
            self.kill()
            raise TrialFailed(f"the engine ended during {do}: {reason_in(self._log)}")
        reply = json.loads(answer)
        if "error" in reply:
            raise TrialFailed(f"{reply['error']} ({reason_in(self._log)})")
        return reply["answer"]

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return not self._answers.closed and self._process.poll() is None

    def stop(self) -> None:
        """End the process; after a minute, kill it."""
        stdin = self._process.stdin
        assert stdin is not None
        if self.alive:
            with contextlib.suppress(BrokenPipeError):
                stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=60)
        self.kill()

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._answers.close()


def reason_in(log: Path) -> str:
    """Return the lines of a log that say why: the first errors, or the end."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if "Error" in line and "Traceback" not in line]
    chosen = dict.fromkeys(errors[:2] or lines[-2:])
    return " | ".join(line[-300:] for line in chosen) or "it printed nothing"
