"""The tuner's end of an engine's process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from vllm_fl.autotune.supervisor import EngineProcess, TrialFailed, reason_in

pytest.importorskip("vllm")


def test_an_engine_that_hangs_is_killed(tmp_path):
    engine = EngineProcess(tmp_path / "log")
    pid = engine._process.pid
    # Importing vLLM alone takes longer.
    with pytest.raises(TrialFailed, match="start took longer than 0 s"):
        engine.ask(0.1, "start", arguments={}, policy=None, live_attention=False)
    assert not engine.alive
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_an_error_is_told_and_an_end_is_noticed(tmp_path):
    engine = EngineProcess(tmp_path / "log")
    with pytest.raises(TrialFailed, match=r"^KeyError: 'dance'$"):
        engine.ask(60, "dance")
    assert engine.alive
    os.kill(engine._process.pid, 9)
    end = "^the engine's process ended with signal SIGKILL during serve: it logged no error$"
    with pytest.raises(TrialFailed, match=end):
        engine.ask(60, "serve", requests=[])
    engine.stop()


PREFIX = "12-01 03:00:00 [core.py:7]"
WARNING = f"""(EngineCore pid=12) WARNING {PREFIX} It is not there:
(EngineCore pid=12) WARNING {PREFIX} Traceback (most recent call last):
(EngineCore pid=12) WARNING {PREFIX}     raise ValueError("Tokenizer not available when")
(EngineCore pid=12) WARNING {PREFIX} ValueError: Tokenizer not available
"""
PRINTED = """Traceback (most recent call last):
  File "one.py", line 1, in <module>
    raise KeyError("first")
KeyError: 'first'

During handling of the above exception, another exception occurred:

(EngineCore pid=12) Traceback (most recent call last):
(EngineCore pid=12)   File "one.py", line 3, in <module>
(EngineCore pid=12) acme.errors.TooLarge: 3 > 2
"""
LOGGED = f"""(EngineCore pid=12) ERROR {PREFIX} EngineCore failed to start.
(EngineCore pid=12) ERROR {PREFIX} Traceback (most recent call last):
(EngineCore pid=12) ERROR {PREFIX}   File "two.py", line 1, in <module>
(EngineCore pid=12) ERROR {PREFIX} RuntimeError: out of memory
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (WARNING, ""),
        (WARNING + "ValueErrors are fine\n", ""),
        (WARNING + PRINTED, "acme.errors.TooLarge: 3 > 2"),
        (WARNING + LOGGED + PRINTED, "RuntimeError: out of memory"),
        (WARNING + f"ERROR {PREFIX} It is full.\nmore\n", "It is full."),
        (WARNING + "terminate called\n  what():  fault\n", "terminate called | what():  fault"),
    ],
)
def test_the_reason_is_what_was_raised_or_logged_as_an_error(tmp_path, text, reason):
    log = tmp_path / "log"
    log.write_text(text)
    assert reason_in(log) == reason


def test_an_engine_ends_with_its_tuner(tmp_path):
    code = (
        "import os, pathlib, sys; from vllm_fl.autotune.supervisor import EngineProcess\n"
        "engine = EngineProcess(pathlib.Path(sys.argv[1]))\n"
        "print(engine._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "log")], capture_output=True, check=False
    )
    assert done.returncode == -9
    for _ in range(300):
        try:
            os.killpg(int(done.stdout), 0)
        except ProcessLookupError:
            return
        time.sleep(0.2)
    pytest.fail("it lives on")
