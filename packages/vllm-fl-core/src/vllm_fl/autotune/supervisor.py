"""The tuner's end of an engine's process: commands with a time limit, and its death."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
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
            how = self._end()
            reason = reason_in(self._log) or "it logged no error"
            raise TrialFailed(f"the engine's process ended with {how} during {do}: {reason}")
        reply = json.loads(answer)
        if "error" in reply:
            reason = reason_in(self._log)
            raise TrialFailed(f"{reply['error']} ({reason})" if reason else reply["error"])
        return reply["answer"]

    def _end(self) -> str:
        """Say how the process that has ended, or is ending, did; kill its children."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.poll()
        self.kill()
        if code is None:
            return "its answers"
        if code >= 0:
            return f"exit code {code}"
        known = {number.value: number.name for number in signal.Signals}
        return f"signal {known.get(-code, -code)}"

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


_PROCESS = re.compile(r"\([^()]*pid=\d+\) ")
_RECORD = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^]]*\] ?(.*)")
"""What vLLM puts before each line of a process, and of a record in the log."""
_TRACEBACK = "Traceback (most recent call last)"
_CRASH = ("Fatal Python error", "terminate called", "what():")


def reason_in(log: Path) -> str:
    """Return the lines of vLLM's log that say why an engine failed; "" if none does.

    The exceptions, or else the texts, of its first errors; without any, that of the last traceback
    that was printed, or what a crash prints. What is logged at lower levels may quote an exception
    and is left out.
    """
    logged, printed = [], []
    for line in log.read_text(errors="replace").splitlines():
        text = _PROCESS.sub("", line.rstrip(), count=1)
        record = _RECORD.match(text)
        if record is None:
            printed.append(text)
        elif record[1] in ("ERROR", "CRITICAL"):
            logged.append(record[2])
    chosen = dict.fromkeys(_exceptions(logged)[:2] or [text.strip() for text in logged[:2]])
    if not chosen:
        crash = [text.strip() for text in printed if text.strip().startswith(_CRASH)]
        chosen = dict.fromkeys(_exceptions(printed)[-1:] or crash[:2])
    return " | ".join(text[-300:] for text in chosen)


def _exceptions(lines: Sequence[str]) -> list[str]:
    """Return the lines that end tracebacks: what was raised."""
    found, inside = [], False
    for line in lines:
        if line.lstrip().startswith(_TRACEBACK):
            inside = True
        elif inside and line and not line[0].isspace():
            found.append(line)
            inside = False
    return found
