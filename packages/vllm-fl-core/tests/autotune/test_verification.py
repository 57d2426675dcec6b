"""The winner against the platform's own defaults, on fake engines; and what is said about it."""

from __future__ import annotations

import pytest
from modelled import THROUGHPUT

pytest.importorskip("jinja2")

from vllm_fl import autotune
from vllm_fl.autotune import report
from vllm_fl.autotune.arena import Costs
from vllm_fl.autotune.report import is_worse_than_platform, verdict
from vllm_fl.autotune.supervisor import TrialFailed
from vllm_fl.autotune.verification import RUNS, Verification, verify
from vllm_fl.cli.main import make_parser

WINNER, DEFAULT = {"rms_norm": "b"}, {"rms_norm": "a"}
OWN = {"rms_norm": ["c"]}


class FakeArena:
    """An engine whose rate is that of what it is built with; a start's runs vary as given."""

    def __init__(self, of_platform, own, rates, vary, starts, broken):
        self.of_platform, self.own, self.rates, self.vary = of_platform, own, rates, iter(vary)
        self.starts, self.broken, self.costs = starts, broken, Costs()

    def start(self, configuration):
        assert self.of_platform is (configuration is None)
        self.used = {op: [impl] for op, impl in (configuration or {}).items()} or self.own
        self.starts.append(self.used.get("rms_norm", ["vLLM"])[0])

    def worker(self, method):
        assert method == "fl_used"
        return self.used

    def measure(self, configuration):
        if self.starts[-1] in self.broken:
            raise TrialFailed("out of luck")
        rate = self.rates[self.starts[-1]]
        return {"output_tokens_per_second": rate * (next(self.vary) if self.of_platform else 1.0)}

    def stop(self):
        pass


def verified(default=None, own=OWN, rates=None, vary=(1.0,) * RUNS, broken=""):
    starts = []
    rates = {"a": 50.0, "b": 100.0, "c": 101.0, "vLLM": 101.0, **(rates or {})}
    how = Verification(
        lambda of_platform: FakeArena(of_platform, own, rates, vary, starts, broken),
        THROUGHPUT, 2, lambda costs: None,
    )  # fmt: skip
    return verify(how, WINNER, default, against_platform=True), starts


def found(verification):
    gain = {"value": 1.2, "low": 1.1, "high": 1.3, "level": 0.95, "count": 12}
    confirmation = {"gain": gain, "verification": verification}
    result = {"winner": WINNER, "name": "rms_norm=b", "confirmations": [confirmation]}
    return {"result": result, "interrupted": False, "undecided": ""}


@pytest.mark.parametrize("default", [None, DEFAULT])
def test_what_the_platform_chooses_itself_is_not_compared_with_it(default):
    verification, starts = verified(default, own={"rms_norm": ["b"]})
    assert verification["same_as_platform"] is True
    assert verification["accepted"]
    assert "against_platform" not in verification
    assert starts == (["b", "b"] if default is None else ["b", "a", "b", "a", "b"])
    words = verdict(found(verification))
    assert words.endswith("It is what the platform's own defaults choose: nothing is compared.")
    assert not is_worse_than_platform(found(verification))


@pytest.mark.parametrize("own", [OWN, {}])
def test_what_is_slower_than_the_platform_is_said_not_to_be_used(own):
    verification, starts = verified(own=own)
    assert len(starts) == 4
    over = verification["against_platform"]
    assert (over["high"], over["count"]) == (pytest.approx(100 / 101), 2 * RUNS)
    words = verdict(found(verification))
    assert "It is 0.9901 [0.9901, 0.9901] (95 %) times as good as the platform" in words
    assert words.endswith("Do not use it instead of those.")
    assert is_worse_than_platform(found(verification))


def test_a_difference_within_the_noise_forbids_nothing():
    verification, _ = verified(vary=(0.97, 1.0, 1.02))
    assert verification["against_platform"]["value"] < 1 < verification["against_platform"]["high"]
    assert verdict(found(verification)).endswith("That is within the noise.")
    assert not is_worse_than_platform(found(verification))


def test_a_winner_that_is_faster_than_the_platform():
    verification, _ = verified(DEFAULT, rates={"c": 80.0})
    assert verification["over_default"] == [2.0, 2.0]
    assert verification["against_platform"]["low"] == pytest.approx(1.25)
    assert verdict(found(verification)).endswith("times as good as the platform's own defaults.")


def test_a_winner_that_is_slower_than_the_default_as_it_will_serve():
    verification, _ = verified(DEFAULT, rates={"a": 200.0})
    assert not verification["accepted"]


def test_a_winner_that_fails_as_it_will_serve():
    verification, starts = verified(DEFAULT, broken="b")
    assert verification == {"accepted": False, "text": "it fails as it will serve: out of luck"}
    assert starts == ["b"]


@pytest.mark.parametrize(
    ("broken", "who", "starts"),
    [
        ("a", ["the default"], "bacc"),
        ("c", ["what the platform's own defaults choose"], "bacab"),
        ("ac", ["the default", "what the platform's own defaults choose"], "bac"),
    ],
)
def test_who_fails_besides_the_winner_is_named_and_not_compared(broken, who, starts):
    verification, started = verified(DEFAULT, broken=broken, rates={"c": 80.0})
    assert verification["accepted"]
    assert verification["failed"] == dict.fromkeys(who, "out of luck")
    assert started == [*starts, *("b" if broken == "a" else "")]
    assert ("over_default" in verification) is ("a" not in broken)
    assert ("against_platform" in verification) is ("c" not in broken)
    assert "same_as_platform" not in verification
    assert all(f"{name} failed and is not compared" in verification["text"] for name in who)
    words = verdict(found(verification))
    assert all(f"{name[1:]} failed and is not compared: out of luck." in words for name in who)


@pytest.mark.parametrize(
    ("vary", "use"),
    [
        ((1.0,) * RUNS, "the platform's own defaults are faster"),
        ((0.97, 1.0, 1.02), "VLLM_FL_CONFIG={out} uses it"),
    ],
)
def test_the_command_does_not_recommend_what_is_slower(tmp_path, monkeypatch, vary, use):
    verification, _ = verified(vary=vary)
    content = found(verification)
    content["result"]["file"] = {}
    monkeypatch.setattr(autotune, "tune", lambda options, **callbacks: content)
    monkeypatch.setattr(report, "html", verdict)
    monkeypatch.setattr(report, "text", verdict)
    out = tmp_path / "tuned.yaml"
    arguments = make_parser().parse_args(["autotune", "--model", "m", "--out", str(out)])
    text, status = arguments.run(arguments)
    assert status == 0
    assert f"Written: {out} ({use.format(out=out)})" in text
    assert out.exists()
