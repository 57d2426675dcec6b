"""AutoTune with real vLLM and the tiny model, from the command line to the tuned start-up."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
import yaml

from vllm_fl.autotune.arena import EngineArena, Limits
from vllm_fl.autotune.objective import Objective
from vllm_fl.autotune.space import policy
from vllm_fl.autotune.studies import open_storage
from vllm_fl.autotune.verification import SETTING_VARIABLES, Verification, verify
from vllm_fl.dispatch import SelectionPolicy, policy_from_config
from vllm_fl.dispatch.ops import CATALOGUE

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import planted  # noqa: E402

BIN = Path(sys.executable).parent
ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 26}
PLANTED = {"PYTHONPATH": str(HERE), "VLLM_FL_PLUGIN_MODULES": "planted"}
OPERATORS = ("silu_and_mul", "rms_norm", "rotary_embedding")


def command(*arguments, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
    return subprocess.run(
        [BIN / "vllm-fl", *arguments],
        env={**clean, "OMP_NUM_THREADS": "1", **PLANTED, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


class Study:
    """One study of the tiny model with planted choices."""

    def __init__(self, folder, model, trials=9, more=(), **env):
        self.env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **env}
        self.out, self.report = folder / "tuned.yaml", folder / "tuned.html"
        workload = folder / "few.workload"
        workload.write_text("{requests: 3, prompt: [4, 24], output: 4, concurrency: 3}")
        self.arguments = [
            "autotune", "--model", str(model), "--workload", str(workload),
            "--trials", str(trials),
            "--engine", json.dumps(ENGINE), "--storage", f"sqlite:///{folder / 'study.db'}",
            "--out", str(self.out), "--seed", "0", "--json",
        ]  # fmt: skip
        self.done = self.run(*more)
        self.found = json.loads(self.done.stdout)

    def run(self, *more):
        done = command(*self.arguments, *more, **self.env)
        assert done.returncode == 0, done.stderr
        return done


@pytest.fixture(scope="module")
def study(tmp_path_factory, tiny_model):
    return Study(tmp_path_factory.mktemp("tuned"), tiny_model)


def test_the_winner_avoids_what_is_slow_wrong_or_slow_together(study):
    winner = study.found["result"]["winner"]
    assert planted.cost(winner) == 0
    assert winner["silu_and_mul"] == "reference.torch"
    (last,) = [c for c in study.found["result"]["confirmations"] if c.get("verification")]
    assert last["gain"]["low"] > 1
    default = {op: impls[0] for op, impls in study.found["space"].items()}
    assert set(default) == set(OPERATORS)
    assert set(default.values()) == {"vendor.acme.slow"}


def test_wrong_and_deadly_choices_are_left_out_with_the_reason(study):
    excluded = study.found["evidence"]["operators"]["silu_and_mul"]["excluded"]
    assert "does not agree with the reference" in excluded["vendor.acme.wrong"]
    assert "the engine's process ended with exit code 7 during" in excluded["vendor.acme.deadly"]
    assert study.found["evidence"]["left"] == {
        "attention_backend": "reference.torch is the only implementation"
    }


def test_what_the_model_calls_is_recorded(study):
    operators = study.found["evidence"]["operators"]
    calls = {op: sum(number for number, _ in operators[op]["calls"].values()) for op in OPERATORS}
    steps = calls["silu_and_mul"] / planted.CALLS["silu_and_mul"]
    assert calls == {op: steps * number for op, number in planted.CALLS.items()}
    assert 4 <= steps <= 12
    assert all(0.01 < operators[op]["share"] < 1 for op in OPERATORS)
    assert all("float32[" in call for op in OPERATORS for call in operators[op]["timings"])
    assert "gelu_and_mul" not in operators


def test_one_engine_served_all_trials(study):
    measured = [trial for trial in study.found["trials"] if trial["value"] is not None]
    assert len(measured) == 9 or len(measured) == study.found["size"]
    assert sum(trial["restarts"] for trial in measured) == 0
    assert len(study.found["costs"]["starts"]) == 2  # the second after the deadly choice
    assert study.found["rate"]["live"] > study.found["rate"]["restarting"]


def test_a_decided_study_is_not_done_again(study):
    again = json.loads(study.run("--resume").stdout)
    assert again["result"] == study.found["result"]
    assert again["costs"]["starts"] == study.found["costs"]["starts"]
    refused = command(*study.arguments)
    assert refused.returncode == 1
    assert "--resume continues it" in refused.stderr


def test_the_file_is_a_configuration(study):
    content = yaml.safe_load(study.out.read_text())
    assert content["tuned"]["device"] == "cpu"
    assert content["tuned"]["shape"]["architecture"] == "Qwen3ForCausalLM"
    assert {"vllm", "torch", "vllm-fl-reference"} <= set(content["tuned"]["versions"])
    made = policy_from_config(study.out)
    assert not made.strict
    winner = study.found["result"]["winner"]
    for op in OPERATORS:
        order = made.get_per_op_order(op)
        assert order[0] == f"impl:{winner[op]}"
        assert "impl:vendor.acme.slow" in order
        assert {"impl:vendor.acme.wrong", "impl:vendor.acme.deadly"}.isdisjoint(order)


def ran(result):
    rows = result["operators"][0]
    return {row["op"]: row["implementation"] for row in rows if row["op"] in OPERATORS}


def test_it_is_found_at_start_up(study, vllm, tiny_model, prompts):
    env = {**PLANTED, "VLLM_FL_TUNED_DIR": str(study.out.parent)}
    result = vllm(tiny_model, prompts[:2], new_tokens=4, env=env)
    assert ran(result) == study.found["result"]["winner"]
    assert f"Operators are chosen by {study.out} (tuned)" in result["log"]


EXPLAIN = """
import os, sys
from vllm_fl.cli import main
for folder in sys.argv[2:]:
    os.environ["VLLM_FL_TUNED_DIR"] = folder
    assert main(["explain", "silu_and_mul", "--model", sys.argv[1], "--dtype", "float32"]) == 0
"""


def test_explain_says_tuned_and_why_not(study, tiny_model, tmp_path):
    content = yaml.safe_load(study.out.read_text())
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.yaml").write_text(yaml.safe_dump(content))
        content["tuned"]["versions"]["vllm-fl-reference"] = "0.0.1"
    folders = [str(tmp_path / "here"), str(tmp_path / "elsewhere")]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
    done = subprocess.run(
        [sys.executable, "-c", EXPLAIN, str(tiny_model), *folders],
        env={**clean, **PLANTED}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    here, elsewhere = done.stdout.split("silu_and_mul(x: Tensor)")[1:]
    assert f"(from {folders[0]}/one.yaml (tuned))" in here
    assert "(tuned)" not in elsewhere
    assert "vllm-fl-reference was 0.0.1, is " in done.stderr


def test_the_report_stands_alone(study):
    page = study.report.read_text()
    assert page.count("<svg") == page.count("</svg>") > 3
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|<script""", page)
    assert study.found["result"]["name"] in page


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_report_in_a_browser(study, tmp_path):
    picture = tmp_path / "report.png"
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}",
            "--window-size=1000,2000", study.report.as_uri(),
        ],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr  # where a page's errors appear
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    # A blank page of this size takes a few kilobytes.
    assert picture.stat().st_size > 50_000


def test_with_nothing_to_choose_the_default_stays_and_the_report_says_so(tiny_model, tmp_path):
    report = tmp_path / "tuned.html"
    keep = [word for op in CATALOGUE for word in ("--keep", op)]
    done = command(
        "autotune", "--model", str(tiny_model), "--workload", "smoke", *keep,
        "--engine", json.dumps(ENGINE), "--storage", f"sqlite:///{tmp_path / 'study.db'}",
        "--out", str(report.with_suffix(".yaml")), VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The default stays: there is nothing to choose" in done.stdout
    assert "there is nothing to choose" in report.read_text()
    assert not report.with_suffix(".yaml").exists()


def test_a_study_whose_time_evidence_used_up_is_not_decided(tmp_path, tiny_model):
    study = Study(tmp_path, tiny_model, trials=2, more=("--time-budget", "1s"))
    assert study.found["trials"] == []
    assert study.found["result"] is None
    words = "Not decided yet: the time was used up before any trial. --resume with more time"
    assert words in study.report.read_text()
    found = json.loads(study.run("--resume").stdout)
    assert found["result"]["trials"] == len(found["trials"]) == 2
    assert found["undecided"] == ""
    with open_storage(found["storage"]) as storage:  # as if it had been killed just before the end
        optuna.load_study(study_name=found["study"], storage=storage).set_user_attr("result", None)
    again = json.loads(study.run("--resume").stdout)
    assert again["result"]["confirmations"] == found["result"]["confirmations"]
    assert again["costs"]["runs"] == found["costs"]["runs"]


@pytest.mark.parametrize("silu", ["vendor.acme.slow", "reference.torch"])
def test_what_the_platform_would_choose_is_told_from_other_choices(
    silu, tiny_model, tmp_path, monkeypatch
):
    for name, value in (PLANTED | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")  # the settings in force
    base = SelectionPolicy.from_dict(prefer="reference").to_dict()
    slow = dict.fromkeys(OPERATORS, "vendor.acme.slow")

    def engine(of_platform):
        made = EngineArena(
            {"model": str(tiny_model), "skip_tokenizer_init": True, "max_model_len": 64,
             "enforce_eager": True, **ENGINE},
            lambda c: policy(base, {op: [f"impl:{impl}"] for op, impl in c.items()}),
            tmp_path, Limits(), rebind=False, unset=SETTING_VARIABLES if of_platform else (),
        )  # fmt: skip
        made.requests = [{"prompt": [1, 2, 3], "output": 2, "arrival": 0.0}]
        return made

    how = Verification(engine, Objective.parse("throughput"), 1, lambda costs: None)
    found = verify(how, {**slow, "silu_and_mul": silu}, None, against_platform=True)
    assert found.get("same_as_platform", False) is (silu == "vendor.acme.slow")
    assert ("against_platform" in found) is (silu != "vendor.acme.slow")


PAIR = "decode:vendor.one+prefill:vendor.two"


def test_attention_of_both_phases_is_found_in_one_engine(tmp_path, tiny_model):
    """The default is slow at prefill alone, the other one at decode alone.

    There are as many trials as choices that need no restart, which plain PyTorch does.
    """
    study = Study(tmp_path, tiny_model, trials=4, VLLM_FL_PLUGIN_MODULES="planted_attention")
    found = study.found
    assert found["result"]["winner"] == {"attention_backend": PAIR}
    orders = found["result"]["file"]["op_backends"]["attention_backend"]
    assert orders["decode"][0] == "impl:vendor.one"
    assert orders["prefill"][0] == "impl:vendor.two"
    live = ["vendor.one", "vendor.two", PAIR, "decode:vendor.two+prefill:vendor.one"]
    evidence = found["evidence"]["operators"]["attention_backend"]
    assert evidence["available"] == [*live[:2], "reference.torch", *live[2:]]
    assert evidence["live"] == live
    assert list(evidence["excluded"]) == ["reference.torch"]  # it would need another engine
    changes = {f"attention_backend={choice}" for choice in live[1:]}
    assert {trial["name"] for trial in found["trials"]} == {"default", *changes}
    assert len(found["costs"]["starts"]) == 1
