"""The parts of the benchmarks that need no GPU: modes, workloads, charts."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_fl.cli.main import make_parser
from vllm_fl.dispatch.config import load
from vllm_fl.dispatch.ops import CATALOGUE

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(ROOT))
from benchmarks import autotune, rounding  # noqa: E402
from benchmarks.e2e import agreement, measuring, memory  # noqa: E402
from benchmarks.e2e.__main__ import parse_arguments as parse_e2e  # noqa: E402
from benchmarks.e2e.models import MODELS, token_bytes, weight_bytes, write_model  # noqa: E402
from benchmarks.e2e.modes import Mode  # noqa: E402
from benchmarks.e2e.process import EngineFailed, NoAnswer  # noqa: E402
from benchmarks.e2e.results import Results, without_folders  # noqa: E402
from benchmarks.e2e.workloads import CHECK, WORKLOADS, Workload  # noqa: E402


def test_modes_are_configurations(tmp_path):
    assert Mode.parse("native", tmp_path) == Mode("native", {"VLLM_PLUGINS": ""})
    assert Mode.parse("control", tmp_path) == Mode("control", {"VLLM_PLUGINS": ""})
    assert Mode.parse("default", tmp_path) == Mode("default", {})
    configs = {
        mode: load(environ=Mode.parse(mode, tmp_path).environ)
        for mode in ("null", "vendor", "flagos")
    }
    assert not any(configs["null"].oot_decision(op) for op in CATALOGUE)
    assert all(configs["vendor"].oot_decision(op) for op in CATALOGUE)
    policy = configs["flagos"].policy()
    assert {policy.get_per_op_order(op) for op in CATALOGUE} == {("flagos",)}
    products = json.loads(Mode.parse("flagos-gemm", tmp_path).configuration)
    assert {*products.pop("flagos_whitelist")} == {*CATALOGUE, "mm", "addmm", "bmm"}
    assert products == json.loads(Mode.parse("flagos", tmp_path).configuration)


def test_a_mode_of_one_s_own(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("prefer: vendor\n")
    mode = Mode.parse(f"mix={mine}", tmp_path)
    assert (mode.name, mode.configuration) == ("mix", "prefer: vendor\n")
    assert load(environ=mode.environ)["prefer"] == "vendor"
    with pytest.raises(ValueError, match="there is no file"):
        Mode.parse("mix=none.yaml", tmp_path)
    with pytest.raises(ValueError, match="there is no mode 'flagoss'"):
        Mode.parse("flagoss", tmp_path)


def test_workloads():
    assert list(map(str, WORKLOADS)) == ["128x512x128", "1x32x256", "32x4096x16"]
    assert Workload.parse("2x3x4") == Workload(2, 3, 4)
    with pytest.raises(argparse.ArgumentTypeError):
        Workload.parse("2x0x4")


def test_models(tmp_path):
    billions = {name: weight_bytes(config) / 2e9 for name, config in MODELS.items()}
    assert billions == pytest.approx(
        {"qwen3-0.6b": 0.596, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.5}, rel=0.005
    )
    written = write_model("qwen3-30b-a3b", 12, tmp_path)
    assert json.loads((written / "config.json").read_text())["num_hidden_layers"] == 12
    assert write_model(str(written), None, tmp_path) == written
    with pytest.raises(ValueError, match="there is no model 'qwen'"):
        write_model("qwen", None, tmp_path)


def test_as_many_engines_as_the_memory_holds():
    device = 140 << 30
    small, large = MODELS["qwen3-0.6b"], MODELS["qwen3-30b-a3b"]
    assert memory.share(small, WORKLOADS, 5, device)[0] == 5
    live, cache = memory.share(large, WORKLOADS, 4, device)
    assert live == 2
    needed = {str(w): w.cached_tokens * token_bytes(large) for w in WORKLOADS}
    assert needed["128x512x128"] < cache < needed["32x4096x16"]
    assert 2 * (weight_bytes(large) + memory.OVERHEAD + cache) <= device - memory.SPARE
    assert memory.share(large, WORKLOADS, 4, None) == (4, max(needed.values()))
    with pytest.raises(ValueError, match="give fewer --layers"):
        memory.share(large, WORKLOADS, 4, 80 << 30)


def test_a_divergence_is_explained_by_a_near_tie_or_not():
    prompts, native = [[1], [2], [3]], [[5, 6], [5, 7], [5, 8]]
    ours = [[5, 6], [5, 9], [4, 8]]
    asked = []

    def ask(texts):
        asked.append(texts)
        return [{"7": -1.0, "9": -1.1}, {"5": -1.0, "4": -3.0}]

    found = agreement.compare(prompts, ours, native, ask, ask)
    assert asked == [[[2, 5], [3]]] * 2
    assert (found["different"], found["unexplained"]) == (2, 1)
    assert found["first"] == found["widest"]
    assert found["first"] == {
        "request": 2, "position": 0, "ours": 4, "theirs": 5, "their_gap": 2.0, "our_gap": -2.0,
        "near_tie": False,
    }  # fmt: skip
    equal = agreement.compare([[1]], [[2]], [[2]], ask, ask)
    assert agreement.describe(equal) == "equal to the baseline"


class FakeEngine:
    """An engine whose tokens and seconds are planted; modes that are named so are broken."""

    log: list[str] = []
    seconds = {"native": 2.0, "fast": 1.0}
    starts: dict[str, float] = {}  # seconds on the planted clock; others start at once

    def __init__(self, environ, log):
        self.mode = log.stem.partition("-")[2]
        self.born = measuring.time.monotonic()
        self.log.append(f"start {self.mode}")

    def ask(self, limit, start):
        if self.mode == "broken":
            raise EngineFailed("planted")
        needed = self.starts.get(self.mode, 0.0)
        if needed:
            measuring.time.wait_until(self.born + min(needed, limit))
        if needed > limit:
            raise NoAnswer("planted")
        return {"device": "none", "versions": {}, "dispatched": {}}

    def generate(self, prompts, new_tokens, limit, logprobs=None):
        if (len(prompts), new_tokens) == (2, 4):
            self.log.append(f"run {self.mode}")
        steps = [{"1": -0.5}] * new_tokens
        return {
            "seconds": self.seconds[self.mode],
            "tokens": [[1] * new_tokens for _ in prompts],
            "logprobs": [steps for _ in prompts],
        }

    def stop(self):
        self.log.append(f"stop {self.mode}")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Make measurements of modes with planted engines; all share one file of results."""
    monkeypatch.setattr(measuring, "Engine", FakeEngine)
    monkeypatch.setattr(measuring, "stop_all", lambda engines: [e.stop() for e in engines])
    FakeEngine.log = []

    def make(*modes, rounds=3, restarts=0, seconds=None, live=3, retry=False):
        return measuring.Bench(
            "model", {}, 100, [Mode(mode, {}) for mode in modes], [Workload(2, 3, 4)], rounds,
            restarts, live, Results(tmp_path / "out.json"), measuring.Clock(seconds), tmp_path,
            retry,
        )  # fmt: skip

    return make


def test_engines_take_turns_and_ratios_are_of_a_round(bench, tmp_path):
    bench("native", "broken", "fast", restarts=2).run()
    turn = ["run native", "run fast"]
    turns = [*turn, *turn, *turn[::-1], *turn]  # the first is not timed
    assert FakeEngine.log == [
        "start native", "start broken", "start fast", "stop broken", *turns, "stop native",
        "stop fast", *["start native", "start fast", "stop native", "stop fast"] * 2,
    ]  # fmt: skip
    records = json.loads((tmp_path / "out.json").read_text())["models"]["model"]
    assert records["native"]["output_tokens_per_second"] == {"2x3x4": [4.0] * 3}
    assert records["fast"]["output_tokens_per_second"] == {"2x3x4": [8.0] * 3}
    assert records["fast"]["ratio"] == {"2x3x4": [2.0] * 3}
    assert records["fast"]["tokens"] == {"2x3x4": {"requests": 2, "different": 0}}
    assert records["fast"]["repeatable"] == {"2x3x4": True}
    assert len(records["fast"]["restart_seconds"]) == len(records["fast"]["restart_ratio"]) == 2
    assert "planted" in records["broken"]["error"]
    assert "2.000 [2.000, 2.000]" in (tmp_path / "out.txt").read_text()


def test_a_run_goes_on_from_the_file(bench):
    bench("native", "fast", "broken", rounds=1).run()
    FakeEngine.log.clear()
    again = bench("native", "fast", "broken", rounds=1)
    again.run()
    assert FakeEngine.log == []
    more = bench("native", "fast", rounds=2)
    more.run()
    assert len(more.results.models["model"]["fast"].ratio["2x3x4"]) == 2
    FakeEngine.log.clear()
    bench("native", "broken", rounds=2, retry=True).run()
    assert "start broken" in FakeEngine.log


def test_restarts_are_warm_on_another_machine_too(bench):
    bench("native", "fast", rounds=1).run()
    FakeEngine.log.clear()
    again = bench("native", "fast", rounds=1, restarts=1)
    again.run()
    assert FakeEngine.log == ["start native", "start fast", "stop native", "stop fast"] * 2
    assert len(again.results.models["model"]["fast"].restart_seconds) == 1


def test_short_workloads_are_repeated_in_a_turn(bench, monkeypatch):
    monkeypatch.setattr(FakeEngine, "seconds", {"native": 0.6, "fast": 0.3})
    made = bench("native", "fast", rounds=1)
    made.run()
    runs = ["run native", "run fast"] + ["run native"] * 3 + ["run fast"] * 3
    assert [line for line in FakeEngine.log if line.startswith("run")] == runs
    assert made.results.models["model"]["fast"].ratio["2x3x4"] == pytest.approx([2.0])


def test_a_run_ends_within_its_time(bench):
    with pytest.raises(measuring.OutOfTime):
        bench("native", "fast", seconds=10).run()
    assert FakeEngine.log == []


def test_what_ends_a_run_ends_its_engines(bench, monkeypatch):
    def ask(self, limit, start):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeEngine, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        bench("native", "fast").run()
    assert {"stop native", "stop fast"} <= set(FakeEngine.log)


class PlantedTime:
    """The module time, of which nothing passes but what is waited for."""

    now = 0.0
    strftime = staticmethod(time.strftime)

    def monotonic(self):
        return self.now

    perf_counter = monotonic

    def wait_until(self, moment):
        self.now = max(self.now, moment)


@pytest.fixture
def clocked(bench, monkeypatch):
    """Run modes, three at a time, whose starts take so many seconds, within a budget."""

    def run(budget, **starts):
        monkeypatch.setattr(measuring, "time", PlantedTime())
        monkeypatch.setattr(FakeEngine, "starts", starts)
        monkeypatch.setattr(FakeEngine, "seconds", dict.fromkeys(starts, 2.0))
        made = bench(*starts, seconds=budget)
        with pytest.raises(measuring.OutOfTime):
            made.run()
        started = sum(line.startswith("start") for line in FakeEngine.log)
        assert started == sum(line.startswith("stop") for line in FakeEngine.log)
        records = made.results.models["model"]
        assert not any(record.error for record in records.values())
        return {mode: record.rounds(Workload(2, 3, 4)) for mode, record in records.items()}

    return run


def test_engines_that_are_there_are_compared_when_one_is_late(clocked):
    found = clocked(200, native=91, slow=300, fast=55)
    assert found == {"native": 3, "slow": 0, "fast": 3}
    assert FakeEngine.log.index("stop slow") < FakeEngine.log.index("run native")


@pytest.mark.parametrize("starts", [{"native": 91, "slow": 200}, {"native": 200, "fast": 55}])
def test_a_start_that_takes_too_long_says_nothing_about_its_mode(clocked, starts):
    assert clocked(215, **starts) == dict.fromkeys(starts, 0)


def test_another_group_is_started_only_if_it_can_be_measured(clocked):
    found = clocked(220, native=91, fast=55, third=55, fourth=55)
    assert found == {"native": 3, "fast": 3, "third": 3, "fourth": 0}
    assert "start fourth" not in FakeEngine.log


def test_results_name_no_folders_of_a_machine(bench, tmp_path, monkeypatch):
    texts = {
        "/tmp/e2e-x1/qwen3-0.6b": "qwen3-0.6b",
        "mix=/home/me/a.yaml": "mix=a.yaml",
        '{"model": "/models/a_b/m"}': '{"model": "m"}',
        'File "/usr/lib/python3/x.py", line 1': 'File "x.py", line 1',
        "sqlite:////tmp/at/study.db": "sqlite:///study.db",
        "file:///tmp/at/a.yaml": "file://a.yaml",
        "build/out.json": "build/out.json",
        "Qwen/Qwen3-8B at 3 tokens/s, https://vllm.ai/a/b":
            "Qwen/Qwen3-8B at 3 tokens/s, https://vllm.ai/a/b",
    }  # fmt: skip
    assert without_folders(list(texts)) == list(texts.values())
    monkeypatch.setattr(sys, "argv", ["e2e", "--out", f"{tmp_path}/out.json"])
    made = bench("native", "fast")
    record = made.results.models["model"]["fast"]
    arguments = {"engine_arguments": {"model": f"{tmp_path}/tiny"}, "device": "", "versions": {}}
    record.note_facts(arguments)
    record.note_error(f"no file {tmp_path}/weights")
    tuned = Mode("tuned", {}, f"model: {tmp_path}/tiny\n")
    for _ in range(2):
        assert made.results.record("model", tuned, retry=False).configuration == "model: tiny\n"
    made.results.save()
    text = (tmp_path / "out.json").read_text()
    assert '"model": "tiny"' in text
    assert "no file weights" in text
    assert str(tmp_path.parent) not in text


def test_kept_results_name_no_folders_of_a_machine():
    for path in (BENCHMARKS / "results").glob("*.json"):
        kept = json.loads(path.read_text())
        assert without_folders(kept) == kept, path.name


def test_a_mode_keeps_its_meaning(bench):
    bench("native", "fast").run()
    with pytest.raises(ValueError, match="another configuration"):
        bench("native").results.record("model", Mode("fast", {}, "prefer: vendor"), retry=False)


def test_whole_engines_on_the_cpu(tmp_path, tiny_model):
    out = tmp_path / "e2e.json"
    engine = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 26}
    command = [
        sys.executable, "-m", "benchmarks.e2e", "--smoke", "--model", str(tiny_model),
        "--baseline", "null", "--mode", "default", "--workload", "2x8x4", "--rounds", "2",
        "--engine", json.dumps(engine), "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (records,) = json.loads(out.read_text())["models"].values()
    assert records["null"]["facts"]["dispatched"] == {}
    assert records["default"]["facts"]["dispatched"]["rms_norm"] == "reference.torch"
    assert len(records["default"]["ratio"]["2x8x4"]) == 2
    assert records["default"]["tokens"]["2x8x4"] == {"requests": 2, "different": 0}
    assert records["default"]["logprob_error"] < 1e-4


@pytest.fixture
def tuning(tmp_path):
    """The arguments of benchmarks/autotune, its folder there, and the model."""
    arguments = autotune.parse_arguments(["--layers", "12", "--folder", str(tmp_path), "--seed=3"])
    return arguments, write_model(arguments.model, arguments.layers, arguments.folder)


def test_autotune_resumes_a_study_and_then_compares(tuning):
    arguments, model = tuning
    words = autotune.tuning_command(arguments, model, 100.0)
    parsed = make_parser().parse_args(words[words.index("autotune") :])
    assert (parsed.time_budget, parsed.verify_starts, parsed.seed) == (100.0, 0, 3)
    assert parsed.engine["load_format"] == "random_normal"
    assert json.loads(Path(parsed.workload).read_text()) == {
        "requests": 128, "prompt": 512, "output": 128, "concurrency": 128,
    }  # fmt: skip
    assert not parsed.resume
    (arguments.folder / "study.db").touch()
    assert autotune.tuning_command(arguments, model, 100.0)[-2] == "--resume"
    (arguments.folder / "tuned.yaml").touch()
    words = autotune.comparison_command(arguments, True, 100.0)
    compared = parse_e2e(words[words.index("benchmarks.e2e") + 1 :])
    modes = [Mode.parse(mode, arguments.folder).name for mode in compared.mode]
    assert (compared.baseline, modes) == ("native", ["flagos", "vendor", "tuned"])
    assert (compared.layers, compared.live, list(map(str, compared.workload))) == (
        12, 4, ["128x512x128"],
    )  # fmt: skip


def test_autotune_keeps_what_it_found(tuning):
    arguments, model = tuning
    (arguments.folder / "found.json").write_text('{"result": null}')
    assert autotune.tune(arguments, model, 1.0) == {"result": None}


def test_autotune_does_not_keep_what_is_not_decided(tuning, monkeypatch):
    arguments, model = tuning
    answers = iter(['{"result": null}', '{"result": {"winner": null}}'])
    monkeypatch.setattr(
        autotune.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=next(answers))
    )
    assert autotune.tune(arguments, model, 1.0) == {"result": None}
    for _ in range(2):  # the second time what was found is read
        assert autotune.tune(arguments, model, 1.0) == {"result": {"winner": None}}


def test_gains_are_taken_within_rounds():
    def record(*figures):
        return {"output_tokens_per_second": {"w": list(figures)}}

    records = {
        "native": record(10, 20), "base": record(5, 10), "short": record(1),
        "failed": {"output_tokens_per_second": {}}, "tuned": record(20, 40),
    }  # fmt: skip
    found = autotune.gains(records, "w")
    assert {mode: over["value"] for mode, over in found.items()} == pytest.approx(
        {"native": 2.0, "base": 4.0}
    )
    tuning = {
        "trials": [{}] * 3, "size": 9, "rate": {"live": 4.0, "restarting": 0.5},
        "result": {"winner": {}, "name": "moe_sum=vendor.cuda"},
    }  # fmt: skip
    text = autotune.report({"tuning": tuning, "gains": found}, "w")
    assert "4.0 re-bound in the live engine, 0.50 if engines were started" in text
    assert "moe_sum=vendor.cuda" in text
    assert "4.0000 [4.0000, 4.0000] times as fast as base" in text


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


def test_rounding_compares_every_position_with_fp32(monkeypatch):
    small = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    }  # fmt: skip
    monkeypatch.setitem(MODELS, "small", {**MODELS["qwen3-0.6b"], **small})
    found = rounding.errors("small")
    assert found.shape == (CHECK.batch * CHECK.prompt,)
    assert 0 < found.min() <= found.max() < 0.05
    monkeypatch.setattr(rounding, "ROUNDED", torch.float16)  # three bits more
    assert rounding.errors("small").median() < found.median() / 4
