"""Engines as a place to measure: which runs are asked for, of a fake engine."""

from __future__ import annotations

import pytest

from vllm_fl.autotune import arena as arenas
from vllm_fl.autotune.arena import EngineArena, Limits
from vllm_fl.autotune.supervisor import TrialFailed

DEFAULT, OTHER = {"rms_norm": "a"}, {"rms_norm": "b"}


class FakeEngine:
    """Binds what it is told; a run takes as many seconds as there have been runs."""

    made: list[FakeEngine] = []
    refuses: tuple[str, ...] = ()

    def __init__(self, log, unset):
        self.done, self.alive = [], True
        self.made.append(self)

    def ask(self, limit, do, **arguments):
        self.done.append(do)
        if do == "start":
            self.started = arguments
        if do == "worker":
            (policy,) = arguments["arguments"]
            if policy.get("attention_backend") in self.refuses:
                raise TrialFailed("NotRebindable: another layout")
            return {"bound": dict(policy)}
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


def attention(impl):
    return {"attention_backend": impl}


def test_attention_is_re_bound_where_it_can_be(arena, monkeypatch):
    arena.live = {"attention_backend": ("a", "b", "pair")}
    monkeypatch.setattr(FakeEngine, "refuses", ("pair",))
    for impl, engines in [("a", 1), ("b", 1), ("a", 1), ("c", 2), ("b", 3), ("pair", 4)]:
        arena.measure(attention(impl))
        assert len(FakeEngine.made) == engines, impl
    assert [engine.started["policy"] for engine in FakeEngine.made] == [
        attention(impl) for impl in ("a", "c", "b", "pair")
    ]
    assert all(engine.started["live_attention"] for engine in FakeEngine.made)


def test_an_engine_that_is_not_re_bound_is_as_it_will_serve(arena):
    arena.rebind = False
    arena.measure(DEFAULT)
    (engine,) = FakeEngine.made
    assert engine.started["live_attention"] is False
    assert "worker" not in engine.done
