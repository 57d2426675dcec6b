"""Deciding about a study, on a model of an engine."""

from __future__ import annotations

import time

import pytest
from modelled import PLANTED, THROUGHPUT, ModelledArena, search

from vllm_fl.autotune.measuring import LOOKS, OutOfTime
from vllm_fl.autotune.options import Options
from vllm_fl.autotune.search import tried
from vllm_fl.autotune.space import needs_restart
from vllm_fl.autotune.tuner import Tuner

SMALL = {"silu_and_mul": PLANTED["silu_and_mul"]}


class Restarted(ModelledArena):
    """Counts the engines that it would start."""

    starts, built = 0, None

    def admit(self, configuration):
        self.bind(configuration)

    def bind(self, configuration):
        if self.built is None or needs_restart(self.built, configuration, self.live):
            self.starts, self.built = self.starts + 1, configuration

    def measure(self, configuration):
        self.bind(configuration)
        return super().measure(configuration)


class ModelledTuner(Tuner):
    """Measures on a model of an engine; its time budget ends after so many seconds."""

    def __post_init__(self):
        self.arena = Restarted(SMALL)
        self.objective = THROUGHPUT
        self._began = time.monotonic()

    def _winner(self, study, space, configuration, outcome, confirmations):
        return {"winner": configuration, "confirmations": confirmations}

    def _verify(self, study, configuration, default):
        return {"accepted": True, "text": "trials"}


def decide(tuner, trials, **more):
    found = search(tuner.arena, trials, **more)
    return tuner._decide(found.study, found.space), found


@pytest.mark.parametrize("only_default", [False, True])
def test_without_trials_nothing_is_decided(only_default):
    tuner = ModelledTuner(Options("m", trials=3, seconds=1e-9))
    more = {"fits": lambda c: c["silu_and_mul"] == "flagos"} if only_default else {"deadline": 0}
    with pytest.raises(OutOfTime, match="used up before any trial"):
        decide(tuner, 3, **more)


def test_what_looks_faster_and_is_not_confirmed_leaves_the_study_undecided():
    tuner = ModelledTuner(Options("m", trials=3, seconds=1e-9))
    with pytest.raises(OutOfTime, match="the confirmation of silu_and_mul=vendor"):
        decide(tuner, 3)
    tuner.options = Options("m", trials=3, seconds=1e9)
    result, found = decide(tuner, 3)
    assert result["winner"] == {"silu_and_mul": "vendor"}
    assert len(tried(found.study)) == 3


@pytest.mark.parametrize(("times", "wins"), [([0.2, 0.1], True), ([0.2, 0.1999], False)])
def test_a_confirmation_that_restarts_engines_is_short_and_says_how_many(times, wins):
    told = []
    tuner = ModelledTuner(Options("m", trials=2), tell=told.append)
    tuner.arena = Restarted({"attention_backend": dict(zip("ab", times, strict=True))})
    study, space = (found := search(tuner.arena, 2)).study, found.space
    tuner.arena.noise = 0 if wins else 0.05
    tuner.arena.starts, tuner.arena.built = 0, space.default
    result = tuner._decide(study, space)
    assert told == ["confirming with up to 25 engine starts: attention_backend=b"]
    assert tuner.arena.starts == 25
    assert (result["winner"] is not None) is wins
    assert result["confirmations"][0]["rounds"] == LOOKS[0]


def test_the_time_ends_a_confirmation_between_turns():
    tuner = ModelledTuner(Options("m", trials=2, seconds=1e9))
    tuner.arena = Restarted({"attention_backend": {"a": 0.2, "b": 0.1}})
    found = search(tuner.arena, 2)
    measured = tuner.arena.measured
    tuner._over = lambda: tuner.arena.measured >= measured + 4
    with pytest.raises(OutOfTime, match="after 1 of the 12 rounds"):
        tuner._decide(found.study, found.space)
    assert tuner.arena.measured == measured + 4
