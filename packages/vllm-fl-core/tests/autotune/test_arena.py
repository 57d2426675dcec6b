"""Engines as a place to measure: which runs are asked for, of a fake engine."""

from __future__ import annotations

import pytest

from vllm_fl.autotune import arena as arenas
from vllm_fl.autotune.arena import EngineArena, Limits

DEFAULT, OTHER = {"rms_norm": "a"}, {"rms_norm": "b"}


class FakeEngine:
    """Binds what it is told; a run takes as many seconds as there have been runs."""

    made: list[FakeEngine] = []

    def __init__(self, log, unset):
        self.done, self.alive = [], True
        self.made.append(self)

    def ask(self, limit, do, **arguments):
        self.done.append(do)
        if do == "worker":
            return {"bound": dict(arguments["arguments"][0])}
        if do == "serve":
            return {"seconds": float(self.done.count("serve"))}
        return {}

    def stop(self):
        self.alive = False

    kill = stop


@pytest.fixture
def arena(monkeypatch, tmp_path):
    monkeypatch.setattr(arenas, "EngineProcess", FakeEngine)
    monkeypatch.setattr(FakeEngine, "made", [])
    return EngineArena({}, dict, tmp_path, Limits())


def test_the_first_run_of_a_configuration_is_not_measured(arena):
    seconds = [arena.measure(c)["seconds"] for c in (DEFAULT, DEFAULT, OTHER, DEFAULT, OTHER)]
    assert seconds == [2, 3, 5, 6, 7]  # the first and the fourth are not
    assert arena.costs.runs == seconds
    (engine,) = FakeEngine.made
    assert engine.done == ["start", *["serve"] * 3, *["worker", "serve", "serve"],
                           *["worker", "serve"] * 2]  # fmt: skip


def test_a_new_engine_is_cold(arena):
    arena.measure(DEFAULT)
    FakeEngine.made[0].kill()
    assert arena.measure(DEFAULT)["seconds"] == 2
    arena.stop()
    assert arena.measure(OTHER)["seconds"] == 2
    assert [engine.done.count("serve") for engine in FakeEngine.made] == [2, 2, 2]
