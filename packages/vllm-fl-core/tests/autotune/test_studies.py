"""Studies that several processes share, one of which may be killed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest
from modelled import PLANTED, TOGETHER, ModelledArena, search

from vllm_fl.autotune.search import make_sampler, ranked, tried
from vllm_fl.autotune.studies import (
    DeadTrials,
    claim,
    is_alive,
    me,
    open_storage,
    open_study,
    study_name,
)
from vllm_fl.dispatch import ConfigError

HERE = Path(__file__).parent
TRIALS = 14


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture
def storage(url):
    with open_storage(url) as storage:
        yield storage


def searcher(url, name, seconds=0.2):
    return subprocess.Popen(
        [sys.executable, str(HERE / "searcher.py"), url, str(TRIALS), str(seconds), name],
        stderr=subprocess.PIPE,
    )


def finish(process):
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors.decode()


def study_in(storage):
    return optuna.load_study(study_name="autotune planted", storage=storage)


def check(study):
    """The budget is used up exactly, nothing was measured twice, and the best was found."""
    over = [tuple(sorted(trial.params.items())) for trial in tried(study)]
    assert len(over) == len(set(over)) == TRIALS
    space = ModelledArena(PLANTED, TOGETHER).evidence().space()
    exact = min(space.configurations(), key=ModelledArena(PLANTED, TOGETHER).seconds)
    assert ranked(study)[0].params == exact


def test_two_processes_share_a_study(url, storage):
    both = [searcher(url, "one"), searcher(url, "two")]
    for process in both:
        finish(process)
    study = study_in(storage)
    check(study)
    assert {trial.user_attrs["by"] for trial in ranked(study)} == {"one", "two"}


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_waiting_trial_is_taken_once(url, storage):
    study = open_study("autotune planted", storage, make_sampler(0), resume=True)
    for number in range(32):
        study.enqueue_trial({"x": number})
    together = threading.Barrier(4)

    def take(_):
        with open_storage(url) as own:
            mine = study_in(own)
            together.wait()
            return [mine.ask().number for _ in range(8)]

    with ThreadPoolExecutor(4) as pool:
        taken = [number for numbers in pool.map(take, range(4)) for number in numbers]
    assert sorted(taken) == list(range(32))


def test_a_killed_process_loses_one_trial_which_is_repeated(url, storage):
    first = searcher(url, "killed", seconds=1.0)
    study = None
    while study is None or len(ranked(study)) < 2:
        time.sleep(0.2)
        assert first.poll() is None
        try:
            study = study_in(storage)
        except KeyError:  # the study is not there yet
            continue
    first.kill()
    first.communicate()
    before = {trial.number for trial in ranked(study)}
    assert len(before) >= 2
    finish(searcher(url, "second"))
    check(study)
    assert {t.number for t in ranked(study) if t.user_attrs["by"] == "killed"} >= before


def test_a_process_that_dies_before_its_trial_begins_loses_one_which_is_repeated(
    storage, monkeypatch
):
    monkeypatch.setattr("vllm_fl.autotune.studies.STALE_SECONDS", 0.2)
    arena = ModelledArena(PLANTED, TOGETHER)
    study = open_study("autotune planted", storage, make_sampler(0), resume=True)
    first = {"silu_and_mul": "reference", "rms_norm": "reference", "rotary_embedding": "vendor",
             "moe_sum": "vendor"}  # fmt: skip
    study.enqueue_trial(first)
    with pytest.warns(UserWarning, match="Heartbeat"):
        study.ask()  # as a process does that is killed next: the trial runs without a heartbeat
    search(arena, TRIALS, study)
    check(study)
    assert study.trials[0].state.name == "FAIL"
    assert first in [trial.params for trial in ranked(study)]


def test_a_process_that_dies_before_optuna_s_heartbeat_is_noticed(url, monkeypatch):
    for name in ("HEARTBEAT_SECONDS", "STALE_SECONDS"):
        monkeypatch.setattr(f"vllm_fl.autotune.studies.{name}", 1)
    with open_storage(url) as storage:
        study = open_study("autotune planted", storage, make_sampler(0), resume=True)
        with pytest.warns(UserWarning, match="Heartbeat"):
            DeadTrials.begin(study.ask())  # Optuna's thread does not run here
        dead = DeadTrials(study)
        dead.fail()
        assert study.trials[0].state.name == "RUNNING"
        time.sleep(3)
        dead.fail()
        assert study.trials[0].state.name == "FAIL"


def test_a_study_is_only_continued_when_that_is_asked_for(storage):
    sampler = make_sampler(0)
    first = open_study("autotune x", storage, sampler, resume=False)
    with pytest.raises(ConfigError, match="--resume continues it"):
        open_study("autotune x", storage, sampler, resume=False)
    assert open_study("autotune x", storage, sampler, resume=True).study_name == first.study_name


@pytest.mark.parametrize("url", ["study.db", "sqlite:////no/such/folder/study.db", "x:///y"])
def test_a_storage_that_cannot_be_opened_is_an_error(url, monkeypatch):
    monkeypatch.setattr("vllm_fl.autotune.studies.STORAGE_ATTEMPTS", 1)
    with pytest.raises(ConfigError, match="storage"), open_storage(url):
        pass


def test_the_name_depends_on_what_is_tuned():
    base = {"model": "m", "workload": {"a": 1}}
    assert study_name(base) == study_name(dict(reversed(base.items())))
    assert study_name(base) != study_name({**base, "workload": {"a": 2}})


def test_a_claim_holds_while_its_process_lives_and_ends_with_its_block(url, storage):
    study = open_study("autotune x", storage, make_sampler(0), resume=True)
    with claim(study, storage, "evidence") as mine:
        assert mine
        with claim(study, storage, "evidence") as again:
            assert not again
        with claim(study, storage, "confirmation") as other:
            assert other
    with claim(study, storage, "evidence") as later:
        assert later
    code = (
        "import os, sys; from vllm_fl.autotune import studies, search\n"
        "with studies.open_storage(sys.argv[1]) as storage:\n"
        "    study = studies.open_study('autotune x', storage, search.make_sampler(0), True)\n"
        "    with studies.claim(study, storage, 'evidence') as mine:\n"
        "        assert mine\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, url], check=False)
    assert done.returncode == -9
    with claim(study, storage, "evidence") as mine:
        assert mine


def test_a_claim_whose_process_died_before_it_said_who_it_is_ends(storage, monkeypatch):
    monkeypatch.setattr("vllm_fl.autotune.studies.STALE_SECONDS", 0.3)
    study = open_study("autotune x", storage, make_sampler(0), resume=True)
    optuna.create_study(study_name="autotune x: evidence 0", storage=storage)
    with claim(study, storage, "evidence") as mine:
        assert mine


def test_owners_on_other_machines_are_trusted_for_a_while():
    away = {**me(), "host": "elsewhere"}
    assert is_alive(away)
    assert not is_alive({**away, "time": away["time"] - 4000})
