"""Deciding about a study, on a model of an engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import tempfile
import time

import pytest
from modelled import PLANTED, THROUGHPUT, ModelledArena, search

from vllm_fl.autotune import implementations
from vllm_fl.autotune import workload as workloads
from vllm_fl.autotune.agreement import Continuation
from vllm_fl.autotune.arena import Costs
from vllm_fl.autotune.evidence import Evidence, OperatorEvidence
from vllm_fl.autotune.measuring import LOOKS, OutOfTime
from vllm_fl.autotune.options import Options
from vllm_fl.autotune.search import make_sampler, ranked, tried
from vllm_fl.autotune.space import needs_restart
from vllm_fl.autotune.studies import claim, open_storage, open_study
from vllm_fl.autotune.supervisor import TrialFailed
from vllm_fl.autotune.tuner import SEARCH_SHARE, Tuner
from vllm_fl.dispatch import discovery
from vllm_fl.dispatch.config import load
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.tuned import installed_versions

SMALL = {"silu_and_mul": PLANTED["silu_and_mul"]}


@pytest.fixture(autouse=True)
def folders_of_logs(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Restarted(ModelledArena):
    """Counts the engines that it would start, and notes what is measured."""

    starts, built, costs = 0, None, Costs()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def admit(self, configuration):
        super().admit(configuration)
        self.bind(configuration)

    def bind(self, configuration):
        if self.built is None or needs_restart(self.built, configuration, self.live):
            self.starts, self.built = self.starts + 1, configuration

    def measure(self, configuration):
        self.bind(configuration)
        self.seen.append(configuration)
        return super().measure(configuration)


class ModelledTuner(Tuner):
    """Measures on a model of an engine; its time budget ends after so many seconds."""

    def __post_init__(self):
        self.arena = Restarted(SMALL)
        self.objective = THROUGHPUT
        self._began = time.monotonic()

    def _winner(self, study, space, configuration, confirmations):
        return {"winner": configuration, "confirmations": confirmations}

    def _engines_to_verify(self, study):
        return 0

    def _verify(self, study, configuration, default):
        return {"accepted": True, "text": "trials"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"trials": 0}, "trials is 0; it must be a whole number from 1."),
        ({"trials": 2.5}, "trials is 2.5; it must be a whole number from 1."),
        ({"verify_starts": -1}, "verify_starts is -1; it must be a whole number from 0."),
        ({"seed": -1}, "seed is -1; it must be a whole number from 0 to 4294967295."),
        ({"seed": 2**32}, "seed is 4294967296; it must be a whole number from 0 to 4294967295."),
        ({"seconds": 0.0}, "seconds is 0.0; it must be more than 0."),
        ({"seconds": math.nan}, "seconds is nan; it must be more than 0."),
        ({"trial_seconds": -1.0}, "trial_seconds is -1.0; it must be more than 0."),
        ({"least_share": 1.5}, "least_share is 1.5; it must be from 0 to 1."),
        ({"tolerance": -0.1}, "tolerance is -0.1; it must be a number from 0."),
        ({"tolerance": math.nan}, "tolerance is nan; it must be a number from 0."),
        ({"tolerance": math.inf}, "tolerance is inf; it must be a number from 0."),
    ],
)
def test_numbers_that_mean_nothing_are_refused(given, says):
    with pytest.raises(ConfigError) as error:
        Options("m", **given)
    assert str(error.value) == says


def test_the_least_and_the_most_are_allowed():
    options = Options("m", trials=1, verify_starts=0, seed=2**32 - 1, least_share=0, tolerance=0.0)
    assert (options.trials, options.verify_starts) == (1, 0)
    make_sampler(options.seed)


def name_of_study(folder, **options):
    tuner = Tuner(Options("m", workload="smoke", resume=True, **options))
    with open_storage(f"sqlite:///{folder / 'study.db'}") as tuner._storage:
        return tuner._open().study_name


@pytest.mark.parametrize(
    ("more", "same"),
    [
        ({"tolerance": 0.1}, False),
        ({"least_share": 0.1}, False),
        ({"keep": ("rms_norm",)}, False),
        ({"trials": 3, "seconds": 9.0, "verify_starts": 1, "seed": 2, "trial_seconds": 9.0}, True),
    ],
)
def test_a_study_is_one_of_everything_that_its_evidence_and_trials_depend_on(tmp_path, more, same):
    assert (name_of_study(tmp_path, **more) == name_of_study(tmp_path)) is same


def test_a_study_that_is_decided_belongs_to_its_versions_and_implementations(tmp_path):
    versions, found = installed_versions(), implementations.registered()
    tuner = Tuner(Options("m", workload="smoke", storage=f"sqlite:///{tmp_path / 'study.db'}"))
    with open_storage(tuner.options.storage) as tuner._storage:
        study = tuner._open()
        study.set_user_attr("evidence", {"operators": {}, "left": {}})
        study.set_user_attr("result", {"winner": None, "trials": 0, "confirmations": []})
        study.set_user_attr("facts", {"facts": {"versions": versions}, "implementations": found})
    tuner.options = dataclasses.replace(tuner.options, resume=True)
    assert tuner.tune()["result"]["winner"] is None
    old = {**versions, "vllm-fl-core": "0.0.9"}
    more = {**found, "moe_sum": {**found.get("moe_sum", {}), "vendor.acme": "acme_plugin"}}
    for number, (facts, says) in enumerate([
        ({"facts": {"versions": old}, "implementations": found},
         r"made with versions .*0\.0\.9.*another --storage"),
        ({"facts": {"versions": versions}, "implementations": more},
         r"absent here: vendor\.acme of acme_plugin \(moe_sum\)\. .*another --storage"),
    ]):  # fmt: skip
        storage = f"sqlite:///{tmp_path / f'{number}.db'}"
        tuner.options = dataclasses.replace(tuner.options, storage=storage)
        with open_storage(storage) as tuner._storage:
            tuner._open().set_user_attr("facts", facts)
        with pytest.raises(ConfigError, match=says):
            tuner.tune()


def test_other_implementations_than_a_study_s_are_named_by_wheel_or_module():
    made = {
        "silu_and_mul": {"reference.torch": "vllm-fl-reference", "vendor.acme.fast": "planted"},
        "rms_norm": {"reference.torch": "vllm-fl-reference", "vendor.acme.fast": "planted"},
    }
    implementations.check_same(made, {op: dict(by_id) for op, by_id in made.items()})
    here = {
        "silu_and_mul": {"reference.torch": "vllm-fl-reference", "vendor.acme.fast": "other"},
        "rms_norm": {"reference.torch": "vllm-fl-reference"},
    }
    with pytest.raises(ConfigError) as error:
        implementations.check_same(made, here)
    assert str(error.value) == (
        "The study was made with other implementations; absent here: vendor.acme.fast of planted "
        "(rms_norm, silu_and_mul); new here: vendor.acme.fast of other (silu_and_mul). Install the "
        "same wheels, set VLLM_FL_PLUGIN_MODULES as it was, or give another --storage."
    )
    with pytest.raises(ConfigError, match=r"implementations; new here: .* \(rms_norm\)\. Install"):
        implementations.check_same(here | {"silu_and_mul": made["silu_and_mul"]}, made)


def test_what_a_module_named_by_hand_registers_is_known_by_it(tmp_path, monkeypatch):
    (tmp_path / "acme_by_hand.py").write_text(
        "from vllm_fl.dispatch import BackendImplKind, OpImpl\n"
        "def register_builtins(registry):\n"
        "    registry.register_impl(OpImpl('moe_sum', 'vendor.acme', BackendImplKind.VENDOR,"
        " print, vendor='acme'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "acme_by_hand")
    discovery.clear_discovered_plugins()
    try:
        assert implementations.registered()["moe_sum"]["vendor.acme"] == "acme_by_hand"
    finally:
        discovery.clear_discovered_plugins()


@contextlib.contextmanager
def opened(folder, resume, told=None):
    tuner = Tuner(
        Options("m", storage=f"sqlite:///{folder / 'study.db'}", resume=resume),
        tell=(told if told is not None else []).append,
    )
    with open_storage(tuner.options.storage) as tuner._storage:
        yield tuner, tuner._open()


def test_a_study_that_holds_nothing_is_begun_again(tmp_path):
    with opened(tmp_path, resume=False) as (tuner, study):
        tuner._note_costs(study, Costs(starts=[1.0]))
        name = study.study_name
    with opened(tmp_path, resume=False) as (_, again):
        assert again.study_name == name
        again.set_user_attr("evidence", {"operators": {}, "left": {}})
    with (
        pytest.raises(ConfigError, match="holds this study already"),
        opened(tmp_path, resume=False),
    ):
        pass


def test_to_resume_what_there_is_not_begins_and_says_so(tmp_path):
    told = []
    with opened(tmp_path, True, told) as (_, study):
        name = study.study_name
    assert told == ["--resume: the storage holds no such study; a new one begins"]
    with opened(tmp_path, True, told) as (_, again):
        assert again.study_name == name
    assert len(told) == 1


VLLM_REFUSES = (
    "ValidationError: 1 validation error for ModelConfig\n  Value error, User-specified "
    "max_model_len (1231) is greater than the derived max_model_len "
    "(max_position_embeddings={}.0 or model_max_length=None in model's config.json). To allow"
)


@pytest.mark.parametrize(
    ("given", "takes", "says"),
    [
        ({}, 1024, "chat needs 1231 tokens, the model takes 1024: use another --workload (decode, "
                   "single, smoke, a file)."),
        ({"workload": "smoke"}, 64, "The checking set needs 109 tokens, the model takes 64."),
        ({"engine": {"max_model_len": 2000}}, 1024,
         "--engine: max_model_len is 2000, the model takes 1024 tokens."),
    ],
)  # fmt: skip
def test_a_model_that_takes_fewer_tokens_is_said_in_a_line(given, takes, says):
    tuner = Tuner(Options("m", **given))

    def start():
        raise TrialFailed(VLLM_REFUSES.format(takes))

    tuner.arena.start = start
    with pytest.raises(ConfigError) as error:
        tuner._gather(None)
    assert str(error.value) == says


def decide(tuner, trials, **more):
    found = search(tuner.arena, trials, **more)
    return tuner._decide(found.study, found.space), found


@pytest.mark.parametrize("only_default", [False, True])
def test_without_trials_nothing_is_decided(only_default):
    tuner = ModelledTuner(Options("m", trials=3, seconds=1e-9))
    more = {"fits": lambda c: c["silu_and_mul"] == "flagos"} if only_default else {"deadline": 0}
    but = " but the default's" if only_default else ""
    with pytest.raises(OutOfTime, match=f"used up before any trial{but}$"):
        decide(tuner, 3, **more)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ("ab", "attention_backend=b is left to try: it needs about 144 s of engine starts; "),
        ("abc", "attention_backend=b; attention_backend=c are left to try: each needs about 144 s"),
    ],
)
def test_what_there_is_no_time_to_restart_engines_for_is_named(choices, says):
    tuner = ModelledTuner(Options("m", trials=3, seconds=110.0))
    tuner.arena = Restarted({"attention_backend": dict.fromkeys(choices, 0.1)})
    tuner.arena.costs = Costs(starts=[20.0, 24.0])
    with pytest.raises(OutOfTime) as end:
        decide(tuner, 3, fits=lambda c: c["attention_backend"] == "a")
    assert str(end.value).startswith(says)
    assert str(end.value).endswith("; raise --time-budget to 210s or more")  # 0.7 of it is 147 s


@pytest.mark.parametrize("fits", [True, False])
def test_what_restarts_left_out_beside_other_trials_is_named(fits):
    pytest.importorskip("jinja2")
    from vllm_fl.autotune import report

    tuner = ModelledTuner(Options("m", trials=9, seconds=110.0))
    times = {"silu_and_mul": {"a": 0.1, "b": 0.1}, "attention_backend": {"a": 0.1, "b": 0.1}}
    tuner.arena = Restarted(times)
    found = search(tuner.arena, 9, fits=lambda c: fits or c["attention_backend"] == "a")
    tuner.arena.costs = Costs(starts=[20.0, 24.0])
    left_out = tuner._left_out(found.study, found.space)
    assert len(tried(found.study)) == (4 if fits else 2)
    told = report.verdict(
        {
            "result": {"winner": None, "reason": "it is best", "left_out": left_out},
            "undecided": "", "interrupted": False,
        }
    )  # fmt: skip
    more = (
        " Not tried: attention_backend=b is left to try: it needs about 144 s of engine starts; "
        "raise --time-budget to 210s or more."
    )
    assert told == f"The default stays: it is best.{'' if fits else more}"


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


class Studied(ModelledTuner):
    """One of the processes that work on a study, each with its own view of the storage."""

    def __init__(self, options, url, arena, stack):
        super().__init__(options)
        self.arena = arena
        self._storage = stack.enter_context(open_storage(url))
        self.study = open_study("autotune modelled", self._storage, make_sampler(0), resume=True)
        self.verified = 0

    def _evidence(self, study):
        evidence = self.arena.evidence()
        study.set_user_attr("evidence", evidence.to_dict())
        return evidence

    def _verify(self, study, configuration, default):
        self.verified += 1
        return super()._verify(study, configuration, default)

    def work(self):
        self._work(self.study)
        return self.study.user_attrs["result"]


@pytest.fixture
def process(tmp_path):
    """Makes a process that works on the study, on an engine of its own."""
    with contextlib.ExitStack() as stack:

        def make(times=SMALL["silu_and_mul"], trials=3, seconds=None):
            options = Options("m", trials=trials, seconds=seconds)
            url = f"sqlite:///{tmp_path / 'study.db'}"
            return Studied(options, url, Restarted({"silu_and_mul": times}), stack)

        yield make


def measured(process, impl):
    return process.arena.seen.count({"silu_and_mul": impl})


def slow(process, *impls):
    """Let what looked faster in its trial be slower than the default from now on."""
    (times,) = process.arena.times.values()
    process.arena.times = {"silu_and_mul": {**times, **dict.fromkeys(impls, 0.9)}}


@pytest.mark.parametrize("wrong", [False, True])
def test_what_was_refuted_is_not_confirmed_again_by_a_process_that_goes_on(process, wrong):
    first = process(seconds=1e9)
    search(first.arena, 3, first.study)
    if wrong:
        first.arena.wrong = ("vendor",)
    else:
        slow(first, "vendor")
    before = measured(first, "vendor")
    first._over = lambda: measured(first, "reference") > LOOKS[0] // 2
    with pytest.raises(OutOfTime, match="rounds that a confirmation needs"):
        first.work()
    assert measured(first, "vendor") == before + (0 if wrong else LOOKS[0])
    second = process()
    result = second.work()
    assert measured(second, "vendor") == 0
    assert result["winner"] == {"silu_and_mul": "reference"}
    refuted, confirmed = result["confirmations"]
    assert refuted["name"] == "silu_and_mul=vendor"
    assert ("is wrong" in refuted["failure"]) if wrong else refuted["gain"]["high"] < 1
    assert confirmed["gain"]["low"] > 1


def test_what_was_refuted_is_not_confirmed_again_after_more_trials(process):
    first, second = process(trials=2), process()
    search(first.arena, 2, first.study)
    slow(first, "vendor")
    assert first.work()["winner"] is None
    result = second.work()
    assert measured(second, "vendor") == 0
    assert result["winner"] == {"silu_and_mul": "reference"}
    assert result["trials"] == 3


def test_a_confirmation_outlives_what_ends_its_verification(process, monkeypatch):
    first = process()
    with monkeypatch.context() as patch:
        patch.setattr(ModelledTuner, "_verify", interrupt)
        with pytest.raises(KeyboardInterrupt):
            first.work()
    second = process()
    result = second.work()
    assert second.arena.measured == 0
    assert second.verified == 1
    assert result["winner"] == {"silu_and_mul": "vendor"}
    (entry,) = result["confirmations"]
    assert entry["verification"]["accepted"]
    assert entry["rounds"] == LOOKS[0]


@pytest.mark.parametrize(("engines", "seconds"), [(4, 399.0), (1, 99.0)])
def test_a_verification_for_which_there_is_no_time_is_left_to_who_goes_on(
    process, waits, engines, seconds
):
    first, second = process(seconds=seconds), process(seconds=engines * 100.0 + 1)
    for one in (first, second):
        one.arena.costs = Costs(starts=[100.0, 90.0])
        one._engines_to_verify = lambda study: engines
    with pytest.raises(OutOfTime, match=f"the {engines} engine starts .* silu_and_mul=vendor, w"):
        first.work()
    assert first.verified == 0
    result = second.work()
    assert measured(second, "vendor") == 0
    assert second.verified == 1
    assert result["winner"] == {"silu_and_mul": "vendor"}


@pytest.mark.parametrize(
    ("graphs", "eager", "own", "starts", "engines"),
    [
        (True, False, True, 2, 4),
        (True, False, False, 2, 6),
        (True, True, False, 2, 4),
        (False, False, False, 3, 6),
        (False, False, True, 2, 0),
        (True, False, False, 0, 0),
    ],
)
def test_as_many_engines_verify_as_there_is_to_compare(
    tmp_path, monkeypatch, graphs, eager, own, starts, engines
):
    monkeypatch.setattr("vllm_fl.autotune.tuner.is_platform_s_own", lambda settings: own)
    tuner = Tuner(Options("m", engine={"enforce_eager": eager}, verify_starts=starts))
    with open_storage(f"sqlite:///{tmp_path / 'study.db'}") as tuner._storage:
        study = tuner._open()
        study.set_user_attr("facts", {"graphs": graphs})
        assert tuner._engines_to_verify(study) == engines


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupted_trial_prints_nothing(tmp_path, monkeypatch):
    class Interrupted(ModelledTuner):
        def _work(self, study):
            study.optimize(interrupt, n_trials=1)

    monkeypatch.setattr("vllm_fl.autotune.tuner.summary", lambda *found: found[2])
    tuner = Interrupted(Options("m", storage=f"sqlite:///{tmp_path / 'study.db'}"))
    tuner.arguments, tuner.settings = {"model": "m"}, load(environ={})
    tuner.workload, tuner._folder = workloads.load("smoke"), tmp_path / "logs"
    tuner._folder.mkdir()
    tuner.arena.stop = lambda: None
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    monkeypatch.setattr(logging.getLogger("optuna"), "handlers", [handler])
    assert tuner.tune() is True
    assert records == []


def test_what_its_verification_refuted_is_not_verified_again(process, monkeypatch):
    refused = {"accepted": False, "text": "slower as it will serve"}
    first = process(trials=2)
    with monkeypatch.context() as patch:
        patch.setattr(ModelledTuner, "_verify", lambda *_: refused)
        assert first.work()["winner"] is None
    second = process()
    result = second.work()
    assert second.verified == 1  # silu_and_mul=reference
    assert result["winner"] == {"silu_and_mul": "reference"}
    assert result["confirmations"][0]["verification"] == refused


def test_what_was_not_verified_is_when_that_is_asked_for(process):
    first = process(trials=2)
    first.options = dataclasses.replace(first.options, verify_starts=0)
    first.work()
    second = process()
    assert second.work()["winner"] == {"silu_and_mul": "vendor"}
    assert measured(second, "vendor") == 0
    assert second.verified == 1


def test_a_winner_stays_one_when_later_trials_that_look_better_are_refuted(process):
    times = {"a": 0.5, "b": 0.1, "c": 0.2, "d": 0.3, "e": 0.4}
    first = process(times, trials=2)
    assert first.work()["winner"] == {"silu_and_mul": "b"}
    second = process({**times, "c": 0.01, "d": 0.02, "e": 0.03}, trials=5)
    search(second.arena, 5, second.study)
    assert ranked(second.study)[3].params == {"silu_and_mul": "b"}
    slow(second, *"cde")
    result = second.work()
    assert [entry["name"][-1] for entry in result["confirmations"]] == ["c", "d", "e", "b"]
    assert measured(second, "b") == 0
    assert result["winner"] == {"silu_and_mul": "b"}


def test_a_trial_that_ends_during_the_confirmation_is_decided_about_too(process):
    """The first process's time for the search is over while the other one still tries."""
    first, other = process(), process()
    search(first.arena, 2, first.study)
    for one in (first, other):
        one.arena.times = {"silu_and_mul": {**SMALL["silu_and_mul"], "reference": 0.01}}
    first._search = lambda study, evidence: None

    def verify(*_):
        search(other.arena, 3, other.study)
        return {"accepted": True, "text": "trials"}

    first._verify = verify
    result = first.work()
    assert result["winner"] == {"silu_and_mul": "reference"}
    assert result["trials"] == len(tried(first.study)) == 3
    assert other.work() == result


def test_evidence_that_came_just_before_the_claim_is_not_gathered_again(process, monkeypatch):
    one = process()

    @contextlib.contextmanager
    def late(*arguments):
        with claim(*arguments) as mine:
            one._evidence(one.study)
            yield mine

    monkeypatch.setattr("vllm_fl.autotune.tuner.claim", late)
    monkeypatch.setattr(one, "_gather", lambda study: pytest.fail("it is gathered again"))
    with pytest.raises(KeyError, match="facts"):  # what comes next needs an engine
        Tuner._evidence(one, one.study)


@pytest.fixture
def waits(monkeypatch):
    """Seconds of each wait; no other time passes."""
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        assert len(waits) < 100, "it waits for ever"

    now = time.monotonic()
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now + sum(waits))
    return waits


def test_the_time_ends_the_wait_for_another_process_s_evidence(process, waits):
    other, mine = process(), process(seconds=20)
    with (
        claim(other.study, other._storage, "evidence"),
        pytest.raises(OutOfTime, match="while another process gathers the evidence"),
    ):
        Tuner._evidence(mine, mine.study)
    assert sum(waits) == 20


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_the_time_ends_the_wait_for_another_process_s_trial(process, waits):
    """What is over by then is decided about."""
    other, mine = process(), process(seconds=20)
    search(other.arena, 2, other.study)
    running = other.study.ask().number
    assert mine.work()["trials"] == 2
    assert sum(waits) == SEARCH_SHARE * 20
    assert mine.study.trials[running].state.name == "RUNNING"


def test_the_time_ends_the_wait_for_another_process_s_confirmation(process, waits):
    other, mine = process(), process(seconds=20)
    search(other.arena, 3, other.study)
    with (
        claim(other.study, other._storage, "confirmation"),
        pytest.raises(OutOfTime, match="while another process confirms the best"),
    ):
        mine.work()
    assert sum(waits) == 20


def test_an_engine_for_kept_evidence_is_built_with_the_default(tmp_path):
    """Not with the reference: plain PyTorch may be impossible to capture in a graph."""
    outputs = [Continuation((-0.5, -1.25), (7,), ({7: -0.25, 9: -3.0},))]
    here = {"device": "d", "shape": [1], "versions": {"torch": "2"}}
    facts = {
        "facts": here, "graphs": True, "dtype": "bfloat16", "vocabulary": 100,
        "policy": {"prefer": "flagos"}, "implementations": implementations.registered(),
    }  # fmt: skip
    operator = OperatorEvidence(available=("flagos", "reference"), share=1.0, calls={}, live=())
    started = []

    class Arena(Restarted):
        reference = None

        def start(self, configuration):
            started.append((configuration, self.arguments["compilation_config"]))
            return facts

    tuner = ModelledTuner(Options("m"))
    tuner.arena, tuner.arguments = Arena(SMALL), {"model": "m"}
    tuner.workload, tuner.settings = workloads.load("smoke"), load(environ={})
    with open_storage(f"sqlite:///{tmp_path / 'study.db'}") as tuner._storage:
        study = tuner._open()
        study.set_user_attr("facts", facts)
        study.set_user_attr("reference", {"silu_and_mul": "reference"})
        study.set_user_attr("reference_outputs", [vars(output) for output in outputs])
        study.set_user_attr("evidence", Evidence({"silu_and_mul": operator}).to_dict())
        tuner._evidence(study)
    assert started == [
        ({"silu_and_mul": "flagos"}, {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0})
    ]
    assert tuner.arena.reference == outputs


def test_what_failed_is_no_fall_back_in_the_file(process):
    first = process({"flagos": 0.5, "slow": 0.9, "vendor": 0.1, "wrong": 0.1, "deadly": 0.1})
    entry = first.arena.evidence().operators["silu_and_mul"]
    entry.excluded["slow"] = "alone it takes 1.8 times as long as flagos or more"
    entry.exclude_failed("deadly", "alone it failed: the engine's process ended")
    first.arena.evidence = lambda: Evidence({"silu_and_mul": entry})
    first.arena.wrong = ("wrong",)  # which its trial shows
    first.workload, first.settings = workloads.load("smoke"), load(environ={})
    first.study.set_user_attr("facts", {"facts": {}})
    first._winner = functools.partial(Tuner._winner, first)
    file = first.work()["file"]
    order = ["impl:vendor", "impl:flagos", "impl:slow"]
    assert file["op_backends"]["silu_and_mul"] == order


def test_when_the_default_cannot_run_the_logs_are_kept_and_named(tmp_path):
    class Failing(ModelledTuner):
        def _work(self, study):
            (self._folder / "engine.log").write_text("what vLLM printed")
            raise TrialFailed("the engine's process ended")

    tuner = Failing(Options("m", storage=f"sqlite:///{tmp_path / 'study.db'}"))
    tuner.arguments, tuner.settings = {"model": "m"}, load(environ={})
    tuner.workload, tuner._folder = workloads.load("smoke"), tmp_path / "logs"
    tuner._folder.mkdir()
    tuner.arena.stop = lambda: None
    with pytest.raises(TrialFailed) as error:
        tuner.tune()
    ended, where = str(error.value).splitlines()
    assert ended == "the engine's process ended"
    assert where == f"What the engines printed is in {tmp_path / 'logs'}."
    assert (tmp_path / "logs" / "engine.log").read_text() == "what vLLM printed"
