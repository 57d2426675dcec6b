"""The measuring end of an engine's process: commands with a time limit, and its death."""

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

TOP = Path(__file__).parents[2]
LOGPROBS = 20
"""Candidates whose log-probabilities an engine can be asked for; vLLM's own limit."""
SECONDS_TO_STOP = 3.0


class EngineFailed(Exception):
    """An engine's process has ended or hung; the text is why."""


class NoAnswer(EngineFailed):
    """An engine has not answered within the time; stop it."""


class Engine:
    """An engine in a process of its own, which leads a process group.

    Between commands it waits for its input, and so does the GPU.

    Args:
        environ: what to set in its environment.
        log: a file for what it prints.
    """

    def __init__(self, environ: dict[str, str], log: Path) -> None:
        read, write = os.pipe()
        self._log = log
        chosen = ("VLLM_FL_CONFIG", "USE_FLAGGEMS", "VLLM_PLUGINS")
        clean = {k: v for k, v in os.environ.items() if k not in chosen}
        paths = filter(None, (str(TOP), os.environ.get("PYTHONPATH")))
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "benchmarks.e2e.engine", str(write)],
                env={**clean, "PYTHONPATH": os.pathsep.join(paths), **environ},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=(write,),
                start_new_session=True,
            )
        os.close(write)
        self._answers = os.fdopen(read)

    def ask(self, limit: float, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Args:
            limit: seconds to wait for the answer.
            command: the command; see engine.py.

        Raises:
            NoAnswer: the time is over.
            EngineFailed: the process ended.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and the log says why
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        end = time.monotonic() + limit
        # The engine's own processes may keep the pipe open when the one that is asked has ended.
        while not select.select([self._answers], [], [], 0.5)[0]:
            if self._process.poll() is not None:
                break
            if time.monotonic() > end:
                raise NoAnswer(f"no answer within {limit:.0f} s\n{reason_in(self._log)}")
        ready = select.select([self._answers], [], [], 0)[0]
        answer = self._answers.readline() if ready else ""
        if not answer:
            raise EngineFailed(reason_in(self._log))
        return json.loads(answer)

    def generate(
        self, prompts: list[list[int]], new_tokens: int, limit: float, logprobs: int | None = None
    ) -> dict[str, Any]:
        """Run one batch greedily; return {"seconds", "tokens", "logprobs" if asked for}."""
        return self.ask(limit, run=prompts, new_tokens=new_tokens, logprobs=logprobs)

    def stop(self) -> None:
        """End the process and its own."""
        stop_all([self])


def stop_all(engines: Iterable[Engine]) -> None:
    """End the processes, those that need long by force."""
    processes = [engine._process for engine in engines]
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    end = time.monotonic() + SECONDS_TO_STOP
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, end - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def reason_in(log: Path) -> str:
    """Return the lines of a log that say why: the first errors with their texts, and the end."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "Traceback" not in line]
    chosen = dict.fromkeys((*errors[:3], *lines[-3:]))
    return "\n".join(line[-400:] for line in chosen)
