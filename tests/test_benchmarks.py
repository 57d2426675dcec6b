"""The parts of the benchmarks that need no GPU: modes, workloads, charts."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fl.dispatch.config import load
from vllm_fl.dispatch.ops import CATALOGUE

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def e2e():
    spec = importlib.util.spec_from_file_location("e2e", BENCHMARKS / "e2e.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["e2e"] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def test_modes_are_configurations(e2e, tmp_path):
    assert e2e.mode_environment("native", tmp_path) == ("native", {"VLLM_PLUGINS": ""})
    assert e2e.mode_environment("default", tmp_path) == ("default", {})
    configs = {
        mode: load(environ=e2e.mode_environment(mode, tmp_path)[1])
        for mode in ("null", "vendor", "flagos", "flagos-gemm")
    }
    assert not any(configs["null"].oot_decision(op) for op in CATALOGUE)
    assert all(configs["vendor"].oot_decision(op) for op in CATALOGUE)
    for mode in ("flagos", "flagos-gemm"):
        policy = configs[mode].policy()
        assert {policy.get_per_op_order(op) for op in CATALOGUE} == {("flagos",)}
    assert configs["flagos-gemm"]["use_flaggems"] is True


def test_a_mode_of_one_s_own(e2e, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("prefer: vendor\n")
    name, environ = e2e.mode_environment(f"mix={mine}", tmp_path)
    assert name == "mix"
    assert load(environ=environ)["prefer"] == "vendor"
    with pytest.raises(ValueError, match="there is no file"):
        e2e.mode_environment("mix=none.yaml", tmp_path)
    with pytest.raises(ValueError, match="there is no mode 'flagoss'"):
        e2e.mode_environment("flagoss", tmp_path)


def test_workloads(e2e):
    assert list(map(str, e2e.WORKLOADS)) == ["128x512x128", "1x32x256", "32x4096x16"]
    assert e2e.Workload.parse("2x3x4") == e2e.Workload(2, 3, 4)
    with pytest.raises(argparse.ArgumentTypeError):
        e2e.Workload.parse("2x0x4")


def test_charts_are_drawn_for_every_result(tmp_path):
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "chart.py"), "--out", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    results = {path.stem for path in (BENCHMARKS / "results").glob("*.json")}
    assert drawn == results - {"dispatch_overhead"}
