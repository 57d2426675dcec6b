"""What explain says about flag_gems, and that it is what was measured."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from vllm_fl.cli.main import main
from vllm_fl.dispatch.types import YES
from vllm_fl_flaggems import notes
from vllm_fl_flaggems.gems.source import Entry, Installed

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "kernels-h200.json"
ROWS = {
    "rms_norm": ("rms_norm", "fused_add_rms_norm"),
    "silu_and_mul": ("silu_and_mul",),
    "rotary_embedding": ("rotary_embedding",),
}


@pytest.mark.parametrize("op_name", notes.MEASURED)
def test_the_note_tells_what_was_measured(op_name: str) -> None:
    rows = [row for row in json.loads(RESULTS.read_text())["rows"] if row["op"] in ROWS[op_name]]
    right = [row["us"] for row in rows if "flag_gems" in row["us"]]
    ratios = [us["flag_gems"] / us["ours"] for us in right]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times" in notes.MEASURED[op_name]
    wrong = any("flag_gems" in row["problems"] for row in rows)
    assert wrong == ("less exact" in notes.MEASURED[op_name])


def test_without_flag_gems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "installed", lambda: None)
    assert notes.note("rms_norm") == "own Triton kernel; flag_gems is not installed"


def test_with_flag_gems(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Installed("5.1", (Entry("mm", "mm"),))
    monkeypatch.setattr(notes, "installed", lambda: found)
    assert notes.note("gelu_and_mul") == "own Triton kernel; flag_gems 5.1 is installed"
    assert notes.note("silu_and_mul").endswith(
        "is installed; its kernel for this operator takes 1.50 to 2.78 times as long (5.0.2 on an "
        "H200)"
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
