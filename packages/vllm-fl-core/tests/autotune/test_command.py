"""The command line of the tuner, around a tuner that finds what the test wants."""

from __future__ import annotations

import json
import os
import signal
from datetime import datetime

import pytest

from vllm_fl import autotune
from vllm_fl.cli import main

pytest.importorskip("optuna")
pytest.importorskip("tqdm")
pytest.importorskip("jinja2")

FOUND = {
    "interrupted": False, "undecided": "", "trials": [], "size": 2, "rate": None, "space": {},
    "evidence": {"operators": {}, "left": {}}, "study": "s", "storage": "", "facts": None,
    "workload": None, "objective": None, "reference": None, "costs": None,
    "result": {"winner": None, "reason": "nothing is faster", "confirmations": [], "trials": 2},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def finds(monkeypatch):
    """Sets what tuning does; how often it was called."""
    calls = []

    def use(found):
        def tune(options, **callbacks):
            calls.append(options)
            return found() if callable(found) else found

        monkeypatch.setattr(autotune, "tune", tune)
        return calls

    return use


def run(*arguments):
    return main(["autotune", "--model", "m", *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--out", "/proc/x/y.yaml"], "--out /proc/x/y.yaml cannot be written: No such file or"),
        (["--out", "."], "--out . is a folder. Name a file."),
        (["--out", "d.yaml"], "--out d.yaml is a folder. Name a file."),
        (["--report", "d.yaml"], "--report d.yaml is a folder. Name a file."),
        (["--out", "w.yaml/t.yaml"], "--out w.yaml/t.yaml cannot be written: "),
        (["--report", "/dev/null"], "--report /dev/null is no ordinary file. Name another one."),
        (["--out", "a", "--report", "./a"], "--report and --out are both a. Name another file."),
        (["--out", "t.html"], "--report and --out are both t.html. Name another file."),
        (["--out", "w.yaml"], "--out and --workload are both w.yaml. Name another file."),
        (["--report", "w.yaml"], "--report and --workload are both w.yaml. Name another file."),
        (["--report", "s.db"], "--report and --storage are both s.db. Name another file."),
    ],
)
def test_what_cannot_be_written_is_said_before_the_work(folder, finds, capsys, arguments, says):
    calls = finds(FOUND)
    (folder / "d.yaml").mkdir()
    (folder / "w.yaml").write_text("{requests: 1, prompt: 4, output: 4}")
    assert run("--workload", "w.yaml", "--storage", "sqlite:///s.db", *arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm-fl: {says}")
    assert calls == []
    assert (folder / "w.yaml").read_text().startswith("{requests")


def test_folders_of_what_is_written_are_made(folder, finds, capsys):
    finds(FOUND)
    assert run("--out", "new/er/t.yaml") == 0
    assert "The default stays" in (folder / "new/er/t.html").read_text()
    assert [path.name for path in (folder / "new/er").iterdir()] == ["t.html"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_file_that_was_not_confirmed_is_named_with_its_date(folder, finds, capsys, interrupted):
    out = folder / "tuned.yaml"
    says = "Still there: tuned.yaml, written 2026-03-04 05:06. This run did not confirm it; "
    finds({**FOUND, "interrupted": interrupted})
    assert run() == (130 if interrupted else 0)
    assert "Still there" not in capsys.readouterr().out
    out.write_text("strict: true")
    written = datetime(2026, 3, 4, 5, 6).timestamp()
    os.utime(out, (written, written))
    run()
    assert says in capsys.readouterr().out
    run("--json")
    assert says in (printed := capsys.readouterr()).err
    assert json.loads(printed.out)["interrupted"] is interrupted
    assert out.read_text() == "strict: true"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_work_and_the_report_is_written(folder, finds, number):
    def tune():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            if number == signal.SIGTERM:
                signal.raise_signal(number)  # as timeout does
            return {**FOUND, "interrupted": True}

    before = signal.getsignal(signal.SIGTERM)
    finds(tune)
    assert run() == 128 + number
    assert "Not decided yet: continue with --resume" in (folder / "tuned.html").read_text()
    assert signal.getsignal(signal.SIGTERM) == before


def test_ctrl_c_before_there_is_a_study_is_a_line(folder, finds, capsys):
    finds(lambda: signal.raise_signal(signal.SIGINT))
    assert run() == 130
    assert capsys.readouterr().err.splitlines()[-1] == "vllm-fl: interrupted"
