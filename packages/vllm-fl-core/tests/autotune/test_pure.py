"""Statistics, evidence, agreement, objectives and workloads: values."""

from __future__ import annotations

import io
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from vllm_fl.autotune import workload
from vllm_fl.autotune.agreement import Continuation, agree
from vllm_fl.autotune.evidence import (
    Evidence,
    OperatorEvidence,
    exclude_dominated,
    leave_at_default,
    relative_time,
)
from vllm_fl.autotune.gathering import policies
from vllm_fl.autotune.objective import Objective
from vllm_fl.autotune.options import Progress
from vllm_fl.autotune.space import Space, needs_restart, orders, policy
from vllm_fl.autotune.statistics import (
    Estimate,
    is_gain,
    median_estimate,
    ratio_estimate,
    signed_rank_index,
    widest_estimate,
)
from vllm_fl.cli.autotune import _shower
from vllm_fl.dispatch import ConfigError, SelectionPolicy


@pytest.mark.parametrize(
    ("count", "level", "index"),
    # Quantiles of the signed-rank distribution, as in the tables of Hollander and Wolfe.
    [(5, 0.95, 0), (6, 0.95, 1), (8, 0.95, 4), (10, 0.95, 9), (10, 0.99, 4), (20, 0.95, 53)],
)
def test_signed_rank_index(count, level, index):
    assert signed_rank_index(count, level) == index


def test_the_interval_covers_as_often_as_it_says():
    generator = random.Random(0)
    hits = 0
    for _ in range(400):
        estimate = ratio_estimate([math.exp(generator.gauss(0.1, 0.3)) for _ in range(10)])
        hits += estimate.low < math.exp(0.1) < estimate.high
    assert 0.93 < hits / 400 < 0.98


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12))
def test_intervals_hold_their_value_and_follow_the_ratio(ratios):
    for estimate in (ratio_estimate(ratios), widest_estimate(ratios), median_estimate(ratios)):
        assert estimate.low <= estimate.value * (1 + 1e-9)
        assert estimate.value <= estimate.high * (1 + 1e-9)
        assert estimate.count == len(ratios)
    upside_down = ratio_estimate([1 / ratio for ratio in ratios])
    assert upside_down.value == pytest.approx(1 / ratio_estimate(ratios).value)


def test_few_values_have_no_interval_of_the_level():
    assert ratio_estimate([2.0] * 5).high == math.inf
    assert widest_estimate([2.0, 3.0, 4.0]).level == 0.75
    assert median_estimate([1.0, 2.0, 9.0]) == Estimate(2.0, 1.0, 9.0, 0.75, 3)
    assert median_estimate(list(map(float, range(1, 10)))).low == 2.0


def estimate(value, low, high):
    return Estimate(value, low, high, 0.95, 10)


@pytest.mark.parametrize(
    ("gain", "reason"),
    [
        (estimate(1.10, 1.06, 1.14), ""),
        (estimate(1.04, 1.02, 1.06), "not above the noise, 1.042"),
        (estimate(1.04, 0.99, 1.06), "contains 1"),
        (estimate(0.90, 0.89, 0.92), "slower"),
    ],
)
def test_a_gain_must_exceed_the_noise(gain, reason):
    decision = is_gain(gain, estimate(0.99, 0.96, 1.01))
    assert bool(decision) is not bool(reason)
    assert reason in decision.reason


def evidence():
    slow, fast = [1.0] * 7, [0.5] * 7
    return Evidence(
        {
            "rms_norm": OperatorEvidence(
                ("a", "b", "c"), 0.2, {"x": [10, 2.0], "y": [1, 1.0]},
                {"x": {"a": slow, "b": fast, "c": [2.0] * 7}, "y": {"a": slow, "c": fast}},
            ),
            "moe_sum": OperatorEvidence(("a", "b"), 0.001),
            "silu_and_mul": OperatorEvidence(("a",), 0.5),
            "attention_backend": OperatorEvidence(("a", "b"), live=("a", "b"), serves=True),
        }
    )  # fmt: skip


def test_evidence_leaves_out_what_cannot_matter():
    found = evidence()
    leave_at_default(found, 0.005, ["attention_backend"])
    assert found.left == {
        "moe_sum": "it takes 0.1 % of the time, less than 0.5 %",
        "silu_and_mul": "a is the only implementation",
        "attention_backend": "it was asked to be left",
    }
    for entry in found.operators.values():
        exclude_dominated(entry)
    # c is the slowest on x, but the fastest on y.
    assert not any(entry.excluded for entry in found.operators.values())
    found.operators["rms_norm"].timings["y"]["c"] = [2.0] * 7
    exclude_dominated(found.operators["rms_norm"])
    assert found.operators["rms_norm"].excluded == {
        "c": "alone it takes 2 times as long as a or more"
    }
    assert found.space() == Space({"rms_norm": ("a", "b")})
    assert found.wide_space().choices["rms_norm"] == ("a", "b", "c")
    assert found.live == {"attention_backend": ("a", "b")}
    found.operators["rms_norm"].exclude_failed("b", "it fails")
    assert found.space() == Space({})
    assert found.usable["rms_norm"] == ("a", "c")  # what is slow can serve
    assert Evidence.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_the_default_is_never_left_out_and_noise_leaves_nothing_out():
    entry = OperatorEvidence(
        ("a", "b"), 0.1, {"x": [1, 1.0]}, {"x": {"a": [9.0] * 7, "b": [1.0] * 7}}
    )
    exclude_dominated(entry)
    assert not entry.excluded
    entry.timings["x"] = {"a": [1.0, 1.0, 3.0, 0.9, 1.1, 1.0, 1.0], "b": [1.0, 3, 1, 1, 3, 1, 3]}
    exclude_dominated(entry)
    assert not entry.excluded


def test_predictions_weigh_calls_and_shares():
    found = evidence()
    assert relative_time(found.operators["rms_norm"], "b") == 0.5  # on x alone
    assert relative_time(found.operators["rms_norm"], "c") == pytest.approx(20.5 / 11)
    assert found.predicted({"rms_norm": "b"}) == pytest.approx(0.9)


def test_the_policy_of_a_configuration():
    space = Space({"rms_norm": ("a", "b"), "silu_and_mul": ("a", "b")})
    usable = {"rms_norm": ("a", "b", "c"), "silu_and_mul": ("a", "b")}
    changed = orders(space, usable, {"rms_norm": "b", "silu_and_mul": "a"})
    assert changed == {"rms_norm": ["impl:b", "impl:a", "impl:c"]}
    base = SelectionPolicy.from_dict(
        prefer="vendor", per_op_order={"moe_sum": ["flagos"], "rms_norm": ["vendor"]}
    )
    made = SelectionPolicy.from_dict(**policy(base.to_dict(), changed))
    assert made.strict
    assert made.prefer == "vendor"
    assert made.per_op_order_dict == {
        "moe_sum": ("flagos",),
        "rms_norm": ("impl:b", "impl:a", "impl:c"),
    }


@pytest.mark.parametrize(
    ("op", "built", "wanted", "live", "restart"),
    [
        ("rms_norm", "a", "b", (), False),
        ("attention_backend", "a", "a", (), False),
        ("attention_backend", "a", "b", (), True),
        ("attention_backend", "a", "b", ("a", "b"), False),
        ("attention_backend", "a", "c", ("a", "b"), True),
        ("attention_backend", "c", "a", ("a", "b"), True),
        ("attention_backend", "a", "decode:a+prefill:b", ("a", "decode:a+prefill:b"), False),
    ],
)
def test_what_needs_a_restart(op, built, wanted, live, restart):
    live = {"attention_backend": live} if live else {}
    assert needs_restart({op: built}, {op: wanted}, live) is restart


def test_what_serves_by_default_is_named_though_it_is_not_first_in_the_settings():
    """The first one may have refused the model."""
    base = SelectionPolicy.from_dict(per_op_order={"attention_backend": ["impl:b", "impl:a"]})
    made = policies(evidence(), base.to_dict())({"rms_norm": "a"})
    assert made["per_op_order"] == {"attention_backend": ["impl:a", "impl:b"]}


def test_the_policy_of_implementations_that_differ_by_phase():
    pair = "decode:a+prefill:b"
    choices = {"attention_backend": ("a", "b", "c", pair)}
    space = Space(choices)
    assert space.name({"attention_backend": pair}) == f"attention_backend={pair}"
    changed = orders(space, choices, {"attention_backend": pair})
    assert changed == {
        "attention_backend.decode": ["impl:a", "impl:b", "impl:c"],
        "attention_backend.prefill": ["impl:b", "impl:a", "impl:c"],
    }
    base = SelectionPolicy.from_dict(
        per_op_order={"moe_sum": ["flagos"], "attention_backend": ["vendor"]}
    )
    made = SelectionPolicy.from_dict(**policy(base.to_dict(), changed))
    assert dict(made.per_op_order_dict) == {
        "moe_sum": ("flagos",), **{name: tuple(order) for name, order in changed.items()}
    }  # fmt: skip
    default = {"attention_backend": "a"}
    named = {"attention_backend": ["impl:a", "impl:b", "impl:c"]}
    assert orders(space, choices, default, default) == named
    assert orders(Space({}), choices, {}, default) == named  # also where it is left
    assert orders(space, choices, {"attention_backend": pair}, default) == changed
    # Back from a pair that is the default.
    space = Space({"attention_backend": (pair, "a", "b")})
    changed = orders(space, space.choices, {"attention_backend": "b"})
    back = SelectionPolicy.from_dict(**policy(made.to_dict(), changed))
    assert back.per_op_order_dict == {
        "moe_sum": ("flagos",),
        "attention_backend": ("impl:b", "impl:a"),
    }


def continuation(
    prompt=(-1.0, -2.0), tokens=(1, 2), steps=({1: -0.1, 3: -3.0}, {2: -0.5, 4: -0.505})
):
    return Continuation(prompt, tokens, steps)


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        (continuation(), ""),
        (continuation(prompt=(-1.0005, -2.0)), ""),
        (continuation(prompt=(-1.1, -2.0)), "a log-probability differs by 0.1"),
        (continuation(prompt=(-1.004, -2.004)), "by 0.002 nats on average"),
        (continuation(prompt=(math.nan, -2.0)), "differs by nan"),
        (continuation(tokens=(1, 4), steps=({1: -0.1}, {4: -0.5})), ""),
        (continuation(tokens=(3, 2), steps=({3: -0.1}, {2: -0.5})), "token 0 is 3, the ref"),
        (continuation(tokens=(9, 2), steps=({9: -0.1}, {2: -0.5})), "by inf nats likelier"),
    ],
)
def test_agreement(ours, reason):
    decision = agree([ours], [continuation()], 1e-3)
    assert bool(decision) is not bool(reason)
    assert reason in decision.reason


def test_objectives():
    fast = {"output_tokens_per_second": 200.0, "latency_seconds": 1.0, "first_token_seconds": 1.0}
    slow = {"output_tokens_per_second": 100.0, "latency_seconds": 4.0, "first_token_seconds": 1.0}
    assert Objective.parse("throughput").ratio(fast, slow) == pytest.approx(2)
    assert Objective.parse("latency").ratio(fast, slow) == pytest.approx(4)
    mixed = Objective.parse("throughput=1, latency=3")
    assert mixed.ratio(fast, slow) == pytest.approx(2**0.25 * 4**0.75)
    assert mixed.ratio(slow, fast) == pytest.approx(1 / mixed.ratio(fast, slow))
    assert Objective.parse(str(mixed)) == mixed
    for text in ("speed", "throughput=0", "latency,latency", "throughput=x", "latency=nan"):
        with pytest.raises(ConfigError, match=r"objective|positive weight"):
            Objective.parse(text)


@pytest.mark.parametrize("name", workload.PRESETS)
def test_presets(name):
    drawn, shape = workload.load(name), workload.PRESETS[name]
    assert drawn == workload.load(name)
    assert len(drawn.requests) == shape.requests
    spans = [s if isinstance(s, list) else [s, s] for s in (shape.prompt, shape.output)]
    for request in drawn.requests:
        assert spans[0][0] <= request.prompt <= spans[0][1]
        assert spans[1][0] <= request.output <= spans[1][1]
    commands = drawn.as_commands(100)
    assert [len(c["prompt"]) for c in commands] == [r.prompt for r in drawn.requests]
    assert max(max(c["prompt"]) for c in commands) < 100


def test_a_workload_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("{requests: 20, prompt: [1, 8], output: 2, concurrency: 3, rate: 10, seed: 5}")
    drawn = workload.load(str(file))
    arrivals = [request.arrival for request in drawn.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    assert 0.5 < arrivals[-1] < 6
    assert drawn.concurrency == 3
    assert {request.prompt for request in drawn.requests} <= set(range(1, 9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("requests: 3", "prompt, output is missing"),
        ("{requests: 0, prompt: 1, output: 1}", "requests: 0 is not a positive"),
        ("{requests: 1, prompt: [3, 1], output: 1}", r"prompt: \[3, 1\] is not tokens"),
        ("{requests: 1, prompt: 1, output: 1, rate: -1}", "rate: -1 is not"),
        ("{requests: 1, prompt: 1, output: 1, prompts: 1}", "Did you mean 'prompt'"),
        ("[1]", "must hold a mapping"),
        ("a: b: c", "is not YAML"),
        ("{requests: 1, prompt: 1, output: 1, prompt: 2}", "prompt is given twice"),
    ],
)
def test_bad_workload_files_say_what_is_wrong(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        workload.load(str(file))
    with pytest.raises(ConfigError, match="Did you mean 'chat'"):
        workload.load("chatt")


def test_the_progress_line_says_what_is_now():
    bar = tqdm(total=9, file=io.StringIO())
    show = _shower(bar)
    lines = []
    for best, left in ((None, None), (None, 720), (None, 660), (1.25, 600), (1.5, None)):
        name = "" if best is None else "rms_norm=vendor"
        show(Progress(done=2, trials=8, best=best, name=name, seconds_left=left))
        lines.append(bar.postfix)
    assert (bar.n, bar.total) == (2, 8)
    assert lines == [
        "",
        "12 min left",
        "11 min left",
        "best 1.250x: rms_norm=vendor, 10 min left",
        "best 1.500x: rms_norm=vendor",
    ]
