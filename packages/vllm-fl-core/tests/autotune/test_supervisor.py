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
    with pytest.raises(TrialFailed, match=r"KeyError: 'dance' \(it printed nothing\)"):
        engine.ask(60, "dance")
    assert engine.alive
    os.kill(engine._process.pid, 9)
    with pytest.raises(TrialFailed, match="the engine ended during serve"):
        engine.ask(60, "serve", requests=[])
    engine.stop()


def test_the_reason_is_the_first_errors_of_the_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("fine\nTraceback of Error\nValueError: a\nsome\nRuntimeError: b\nlast\n")
    assert reason_in(log) == "ValueError: a | RuntimeError: b"
    log.write_text("one\n\ntwo\nthree\n")
    assert reason_in(log) == "two | three"


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
