"""What explain and doctor say about flag_gems."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from vllm_fl.cli.main import main
from vllm_fl.dispatch.types import YES
from vllm_fl_flaggems import notes
from vllm_fl_flaggems.backend import FlagGemsBackend
from vllm_fl_flaggems.gems.source import Entry, Installed

ROOT = Path(__file__).parents[3]


def test_every_operator_has_the_note() -> None:
    operators = FlagGemsBackend.operators.values()
    assert {implementation.note for implementation in operators} == {"vllm_fl_flaggems.notes:note"}


def test_the_benchmarks_time_flag_gems() -> None:
    rows = json.loads((ROOT / "benchmarks/results/kernels-h200.json").read_text())["rows"]
    assert any({"ours", "flag_gems"} <= row["us"].keys() for row in rows)


def test_without_flag_gems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "installed", lambda: None)
    assert notes.note("rms_norm") == "own Triton kernel; flag_gems is not installed"


def test_with_flag_gems(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Installed("5.1", (Entry("mm", "mm"),))
    monkeypatch.setattr(notes, "installed", lambda: found)
    assert notes.note("silu_and_mul") == (
        "own Triton kernel; flag_gems 5.1 is installed, "
        "and vllm-fl's benchmarks time its kernels, too"
    )


def test_doctor_says_what_is_mended_and_why_pytorchs_operators_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> dict[str, object]:
        assert main(["doctor", "--json"]) == 0
        backends = json.loads(capsys.readouterr().out)["backends"]
        (facts,) = (row["facts"] for row in backends if row["name"] == "flaggems")
        return facts

    (reference,) = (row for row in notes.MENDS if row.name == "launcher")
    assert told()["ATen operators"].startswith("PyTorch's own: USE_FLAGGEMS is not set")
    found = Installed("5.0.2", (Entry("mm", "mm"), Entry("copy_", "copy_")))
    monkeypatch.setattr(notes, "installed", lambda: found)
    monkeypatch.setattr(notes, "possible", lambda: YES)
    monkeypatch.setenv("USE_FLAGGEMS", "1")
    facts = told()
    assert facts["flag_gems"] == "5.0.2"
    assert facts["ATen operators"] == "1 through flag_gems"
    mended = facts["mended in each worker before flag_gems runs"]
    assert mended["launcher"] in ("not needed", reference.why)


def test_explain_shows_the_note(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        here = f"flag_gems {version('flag-gems')} is installed"
    except PackageNotFoundError:
        here = "flag_gems is not installed"
    assert main(["explain", "rms_norm"]) == 0
    assert f"default.flagos: own Triton kernel; {here}" in capsys.readouterr().out
