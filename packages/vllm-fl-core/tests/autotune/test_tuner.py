"""Deciding about a study, on a model of an engine."""

from __future__ import annotations

import time

import pytest
from modelled import PLANTED, THROUGHPUT, ModelledArena, search

from vllm_fl.autotune.measuring import OutOfTime
from vllm_fl.autotune.options import Options
from vllm_fl.autotune.search import tried
from vllm_fl.autotune.tuner import Tuner

SMALL = {"silu_and_mul": PLANTED["silu_and_mul"]}


class ModelledTuner(Tuner):
    """Measures on a model of an engine; its time budget ends after so many seconds."""

    def __post_init__(self):
        self.arena = ModelledArena(SMALL)
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
