"""The tuner's end of an engine's process."""

from __future__ import annotations

import os

import pytest

from vllm_fl.autotune.supervisor import EngineProcess, TrialFailed, reason_in

pytest.importorskip("vllm")


def test_an_engine_that_hangs_is_killed(tmp_path):
    engine = EngineProcess(tmp_path / "log")
    pid = engine._process.pid
    # Importing vLLM alone takes longer.
    with pytest.raises(TrialFailed, match="start took longer than 0 s"):
        engine.ask(0.1, "start", arguments={"model": "/no/such/model"}, policy=None)
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
