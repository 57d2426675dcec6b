"""The search layer on a model of an engine: planted choices, noise, limits."""

from __future__ import annotations

import itertools
import time

import optuna
import pytest
from modelled import PLANTED, THROUGHPUT, TOGETHER, ModelledArena, search

from vllm_fl.autotune.evidence import OperatorEvidence
from vllm_fl.autotune.measuring import LOOKS, OutOfTime, confirm, run_trial
from vllm_fl.autotune.search import Outcome, make_sampler, ranked, seeds, tried

SAME = {op: dict.fromkeys(impls, 0.2) for op, impls in PLANTED.items()}


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_default_and_a_pair_that_is_slow_together(seed):
    """The best that exhaustive search finds, in a third of its trials."""
    arena = ModelledArena(PLANTED, TOGETHER, noise=0.01, seed=seed)
    space = arena.evidence().space()
    exact = min(space.configurations(), key=arena.seconds)
    found = search(arena, space.size // 3)
    best = ranked(found.study)[0].params
    assert arena.seconds(best) == pytest.approx(arena.seconds(exact))
    assert best == exact
    assert exact == {
        "silu_and_mul": "vendor", "rms_norm": "reference", "rotary_embedding": "flagos",
        "moe_sum": "vendor",
    }  # fmt: skip
    assert len(tried(found.study)) <= space.size // 3 == 12


def test_a_small_space_is_searched_whole_and_nothing_twice():
    arena = ModelledArena({"rms_norm": PLANTED["rms_norm"], "moe_sum": PLANTED["moe_sum"]})
    found = search(arena, 50)
    names = [found.space.name(trial.params) for trial in tried(found.study)]
    assert sorted(names) == sorted(map(found.space.name, found.space.configurations()))
    assert ranked(found.study)[0].params == {"rms_norm": "vendor", "moe_sum": "vendor"}


@pytest.mark.parametrize("trials", [12, 50])
def test_each_backend_alone_is_among_the_first(trials):
    evidence = ModelledArena(PLANTED).evidence()
    first = seeds(evidence.space(), evidence, trials)[:5]
    default = evidence.space().default
    for impl in ("flagos", "vendor", "reference"):
        assert {op: impl if impl in PLANTED[op] else default[op] for op in default} in first


def test_what_cannot_be_timed_and_needs_no_restart_is_tried_early():
    evidence = ModelledArena(PLANTED).evidence()
    choices = ("a", "b", "decode:a+prefill:b", "other layout")
    evidence.operators["attention_backend"] = OperatorEvidence(choices, live=choices[:3])
    first = seeds(evidence.space(), evidence, 12)
    best = {op: min(impls, key=impls.get) for op, impls in PLANTED.items()}
    for choice in choices[:3]:
        assert {**best, "attention_backend": choice} in first


def test_what_fails_alone_is_not_tried_again():
    arena = ModelledArena(PLANTED, wrong=("reference",))
    found = search(arena, 30)
    failed = [t for t in tried(found.study) if t.state.name == "FAIL"]
    alone = {op for t in failed if len(c := found.space.changes(t.params)) == 1 for op in c}
    after = dict.fromkeys(alone, 0)
    seen = set()
    for trial in tried(found.study):
        changes = found.space.changes(trial.params)
        for op in seen & set(changes):
            after[op] += changes[op] == "reference"
        if trial.state.name == "FAIL" and len(changes) == 1:
            seen |= set(changes)
    assert not any(after.values())
    assert ranked(found.study)[0].params["silu_and_mul"] == "vendor"
    assert all("is wrong" in trial.user_attrs["failure"] for trial in failed)


def test_the_deadline_ends_the_search():
    arena = ModelledArena(PLANTED)
    found = search(arena, 30, deadline=time.monotonic())
    assert not tried(found.study)


def test_what_there_is_no_time_for_is_not_tried():
    """Among the first configurations and later, and with nothing else left the search ends."""

    def fits(configuration):
        return configuration["silu_and_mul"] != "vendor"

    found = search(ModelledArena(PLANTED), 100, fits=fits)
    assert found.space.size == 36
    assert len(tried(found.study)) == 24
    assert all(fits(trial.params) for trial in tried(found.study))


def test_what_there_was_no_time_for_comes_first_when_there_is():
    study = optuna.create_study(direction="maximize", sampler=make_sampler(0))
    arena = ModelledArena(PLANTED)
    found = search(arena, 12, study, fits=lambda c: c["silu_and_mul"] != "vendor")
    first = seeds(found.space, arena.evidence(), 12)
    over = [trial.params for trial in tried(study)]
    left = [configuration for configuration in first if configuration not in over]
    assert left
    search(arena, len(over) + len(left), study)
    later = [trial.params for trial in tried(study)][len(over) :]
    assert all(configuration in later for configuration in left)


def test_noise_alone_never_wins():
    """Ten studies of identical implementations; each takes its best to the confirmation."""
    for seed in range(10):
        arena = ModelledArena(SAME, noise=0.05, seed=seed)
        found = search(arena, 12)
        top = ranked(found.study)[0]
        assert top.value > 1  # noise has made a winner of the search
        result = confirm(arena, THROUGHPUT, found.space.default, top.params, tests=3)
        assert not result.decision, (seed, result)


@pytest.mark.parametrize("seed", range(5))
def test_a_gain_above_the_noise_wins(seed):
    arena = ModelledArena(PLANTED, TOGETHER, noise=0.02, seed=seed)
    space = arena.evidence().space()
    candidate = {**space.default, "silu_and_mul": "vendor"}
    result = confirm(arena, THROUGHPUT, space.default, candidate, tests=3)
    assert result.decision
    exact = arena.seconds(space.default) / arena.seconds(candidate)
    assert result.gain.low < exact < result.gain.high
    slower = confirm(arena, THROUGHPUT, candidate, space.default, tests=3)
    assert "slower" in slower.decision.reason


@pytest.mark.parametrize("runs", [0, 1, 3 * LOOKS[0] - 1])
def test_too_little_time_decides_nothing(runs):
    arena = ModelledArena(SAME)
    space = arena.evidence().space()
    candidate = {**space.default, "silu_and_mul": "vendor"}
    with pytest.raises(OutOfTime, match=f"after {runs // 3} of the {LOOKS[0]} rounds"):
        confirm(arena, THROUGHPUT, space.default, candidate, 3, over=lambda: arena.measured == runs)
    assert arena.measured == runs


def test_time_that_ends_after_the_first_look_decides():
    arena = ModelledArena(SAME)
    space = arena.evidence().space()
    candidate = {**space.default, "silu_and_mul": "vendor"}
    runs = 3 * LOOKS[0] + 1
    result = confirm(
        arena, THROUGHPUT, space.default, candidate, 3, over=lambda: arena.measured == runs
    )
    assert result.rounds == LOOKS[0]
    assert "contains 1" in result.decision.reason


def test_every_configuration_of_a_large_space_can_be_reached():
    times = {op: {"a": 0.1, "b": 0.1, "c": 0.1} for op in itertools.islice(names(), 9)}
    arena = ModelledArena(times)
    found = search(arena, 20)
    assert found.space.size == 3**9
    assert len(tried(found.study)) == 20


def names():
    return (f"op{i}" for i in itertools.count())


def test_an_interrupted_trial_is_the_first_to_be_continued():
    arena = ModelledArena(PLANTED, TOGETHER)
    measured = []

    def interrupted(configuration):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(configuration)
        return Outcome(1 / arena.seconds(configuration))

    study = optuna.create_study(direction="maximize", sampler=make_sampler(0))
    with pytest.raises(KeyboardInterrupt):
        search(arena, 12, study, evaluate=interrupted)
    assert len(tried(study)) == 3
    search(arena, 12, study)
    assert len(tried(study)) == 12
    over = [tuple(sorted(trial.params.items())) for trial in tried(study)]
    assert len(set(over)) == 12


class Slowed(ModelledArena):
    """Some runs take four times as long: the first of each configuration, or those numbered."""

    def __init__(self, *args, first=False, numbered=(), **kwargs):
        super().__init__(*args, **kwargs)
        self.first, self.numbered, self.seen = first, numbered, set()

    def seconds(self, configuration):
        key = tuple(sorted(configuration.items()))
        slow = self.measured in self.numbered or (self.first and key not in self.seen)
        self.seen.add(key)
        return super().seconds(configuration) * (4 if slow else 1)


@pytest.mark.parametrize("slow", [{"first": True}, *({"numbered": {n}} for n in range(1, 7))])
@pytest.mark.parametrize("silu", ["vendor", "flagos"])
def test_one_slow_run_is_not_the_value_of_a_trial(slow, silu):
    """Neither a first one, with what is compiled in it, nor any other one of the six."""
    planned = ModelledArena(PLANTED)
    default = planned.evidence().space().default
    if silu == "flagos":  # the candidate is the slower one
        default, candidate = {**default, "silu_and_mul": "vendor"}, default
    else:
        candidate = {**default, "silu_and_mul": silu}
    exact = planned.seconds(default) / planned.seconds(candidate)
    arena = Slowed(PLANTED, **slow)
    if "first" in slow:
        arena.measure(default)  # in the trial before
    outcome = run_trial(arena, THROUGHPUT, default, candidate)
    assert min(outcome.facts["ratios"]) < 0.5 or max(outcome.facts["ratios"]) > 2
    assert outcome.value == outcome.facts["ratio"]["value"] == pytest.approx(exact)
