"""Evidence from an engine that is a function: an operator that only another one's choice calls."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch
from modelled import THROUGHPUT
from vllm.config import CompilationConfig, CompilationMode, VllmConfig

from vllm_fl.autotune import arena as arenas
from vllm_fl.autotune.arena import EngineArena, Limits
from vllm_fl.autotune.gathering import gather
from vllm_fl.autotune.measuring import run_trial
from vllm_fl.autotune.supervisor import TrialFailed
from vllm_fl.dispatch import (
    BackendImplKind,
    OpImpl,
    SelectionPolicy,
    bind_op,
    call_op,
    default,
    state,
)
from vllm_fl.integration import recording
from vllm_fl.integration.worker import WorkerExtensionFL

LONG, SHORT = 0.004, 0.002


def silu_slow(x):
    time.sleep(LONG)
    return x[..., :2] + 0


def silu_calling(x):
    return x[..., :2] + call_op("gelu_and_mul", x)


def gelu_slow(x, approximate="none"):
    time.sleep(5 * LONG)
    return x[..., :2] * 0


def gelu_fast(x, approximate="none"):
    return x[..., :2] * 0


def gelu_faster_and_wrong(x, approximate="none"):
    return x[..., :2] + 1


def gelu_failing(x, approximate="none"):
    raise RuntimeError("gelu fails")


def norm(x, residual, weight, epsilon):
    time.sleep(SHORT)
    return x, residual


class FunctionEngine:
    """An engine whose model is two operators, called in this process."""

    def __init__(self, log, unset):
        self.alive = True
        default.get_default_manager().observe(None)  # this would be another process
        self.model = [bind_op("silu_and_mul"), bind_op("rms_norm")]
        self.worker = WorkerExtensionFL()
        self.worker.vllm_config = VllmConfig(
            compilation_config=CompilationConfig(mode=CompilationMode.NONE)
        )
        self.worker.model_runner = SimpleNamespace(
            get_model=torch.nn.Module, cudagraph_manager=SimpleNamespace(graphs={})
        )

    def step(self):
        silu, rms = self.model
        return silu(rms(torch.ones(3, 4), torch.ones(3, 4), torch.ones(4), 1e-6)[0])

    def ask(self, limit, do, **arguments):
        try:
            answer = getattr(self, f"do_{do}")(**arguments)
        except Exception as error:
            raise TrialFailed(f"{type(error).__name__}: {error}") from error
        return json.loads(json.dumps(answer))

    def do_start(self, arguments, policy, live_attention):
        if policy is not None:
            state.set_global_policy(SelectionPolicy.from_dict(**policy))
        return {"policy": state.get_global_policy().to_dict(), "vocabulary": 9}

    def do_serve(self, requests):
        began = time.perf_counter()
        for _ in range(3):
            self.step()
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds, "output_tokens_per_second": 1 / seconds,
            "latency_seconds": seconds, "first_token_seconds": seconds,
        }  # fmt: skip

    def do_check(self, prompts, new_tokens):
        value = -float(self.step().sum())
        return [{"prompt": [value], "tokens": [1], "steps": [{"1": value}]} for _ in prompts]

    def do_worker(self, method, arguments):
        return getattr(self.worker, method)(*arguments)

    def stop(self):
        self.alive = False

    kill = stop


@pytest.fixture
def arena(manager, monkeypatch, tmp_path):
    monkeypatch.setattr(default, "_default", manager)
    planted = {
        "silu_and_mul": (silu_slow, silu_calling),
        "gelu_and_mul": (gelu_slow, gelu_fast, gelu_faster_and_wrong, gelu_failing),
        "rms_norm": (norm,),
    }
    for op, functions in planted.items():
        for place, fn in enumerate(functions):
            name = fn.__name__.partition("_")[2] or "only"
            manager.registry.register_impl(
                OpImpl(op, f"vendor.acme.{name}", BackendImplKind.VENDOR, fn, vendor="acme",
                       priority=109 - place)
            )  # fmt: skip
    monkeypatch.setattr(arenas, "EngineProcess", FunctionEngine)
    arena = EngineArena({"max_model_len": 200}, None, tmp_path, Limits())
    arena.tolerance = 1e-3
    arena.start()
    return arena


def test_what_only_another_choice_calls_is_tuned_with_it(arena):
    told = []
    evidence, reference = gather(arena, 0.005, (), told.append)
    assert "silu_and_mul: vendor.acme.calling calls gelu_and_mul, too" in told
    assert reference == {"silu_and_mul": "vendor.acme.slow", "gelu_and_mul": "vendor.acme.slow"}
    gelu = evidence.operators["gelu_and_mul"]
    assert gelu.available[0] == "vendor.acme.slow"
    ((number, _),) = gelu.calls.values()
    assert number == 3
    assert 0.4 < gelu.share < 1
    assert "does not agree" in gelu.excluded["vendor.acme.faster_and_wrong"]
    assert "gelu fails" in gelu.excluded["vendor.acme.failing"]
    # Alone it is the slower one, but not with what it calls at its best.
    assert evidence.operators["silu_and_mul"].excluded == {}
    space = evidence.space()
    assert space.choices == {
        "silu_and_mul": ("vendor.acme.slow", "vendor.acme.calling"),
        "gelu_and_mul": ("vendor.acme.slow", "vendor.acme.fast"),
    }
    best = min(space.configurations(), key=evidence.predicted)
    assert best == {"silu_and_mul": "vendor.acme.calling", "gelu_and_mul": "vendor.acme.fast"}
    assert run_trial(arena, THROUGHPUT, space.default, best).value > 1


def fail_in(monkeypatch, owner, name, fails):
    """Let a function run out of memory for some arguments."""
    function = getattr(owner, name)

    def failing(*args):
        if fails(*args):
            raise torch.OutOfMemoryError("out of memory")
        return function(*args)

    monkeypatch.setattr(owner, name, failing)


@pytest.fixture
def timed(arena, manager):
    """Gathers, with a choice for rms_norm, too; returns the evidence, what was timed and told."""
    manager.registry.register_impl(
        OpImpl("rms_norm", "vendor.acme.also", BackendImplKind.VENDOR, norm, vendor="acme")
    )
    told = []

    def gathered():
        evidence, _ = gather(arena, 0.005, (), told.append)
        entries = evidence.operators.items()
        names = {op: sorted(set().union(*entry.timings.values())) for op, entry in entries}
        return evidence, names, told

    return gathered


def test_an_operator_whose_calls_cannot_be_kept_is_not_timed_and_others_are(timed, monkeypatch):
    fail_in(monkeypatch, recording, "copied", lambda op, call, shared: op == "silu_and_mul")
    evidence, names, told = timed()
    assert "silu_and_mul is not timed: OutOfMemoryError: out of memory" in told
    assert names["silu_and_mul"] == []
    assert names["rms_norm"] == ["vendor.acme.also", "vendor.acme.only"]
    assert evidence.operators["silu_and_mul"].excluded == {}
    assert set(evidence.space().choices) == {"silu_and_mul", "rms_norm", "gelu_and_mul"}


def test_calls_that_do_not_fit_into_memory_together_are_kept_one_operator_at_a_time(
    timed, monkeypatch
):
    kept = []

    def too_much(op, call, shared):
        kept.append(op)
        return kept == ["rms_norm", "silu_and_mul"]

    fail_in(monkeypatch, recording, "copied", too_much)
    _, names, told = timed()
    assert not any("not timed" in text for text in told)
    assert names["silu_and_mul"] == ["vendor.acme.calling", "vendor.acme.slow"]
    assert names["rms_norm"] == ["vendor.acme.also", "vendor.acme.only"]


@pytest.mark.parametrize("name", ["vendor.acme.slow", "vendor.acme.calling"])
def test_what_runs_out_of_memory_alone_is_not_timed_and_not_excluded(timed, monkeypatch, name):
    fail_in(monkeypatch, WorkerExtensionFL, "fl_time", lambda _, op, impl, *more: impl == name)
    evidence, names, told = timed()
    assert f"silu_and_mul: {name} is not timed: OutOfMemoryError: out of memory" in told
    assert name not in names["silu_and_mul"]
    assert len(names["silu_and_mul"]) == 1
    assert len(names["rms_norm"]) == 2
    assert evidence.operators["silu_and_mul"].excluded == {}


def test_plain_pytorch_attention_gets_no_engine_of_its_own(arena, monkeypatch):
    choices = ["vendor.acme", "vendor.other", "reference.torch"]
    found = {
        "available": choices, "references": ["reference.torch"], "live": choices[:1],
        "unable": {}, "serves": True,
    }  # fmt: skip
    candidates = {**arena.worker("fl_candidates"), "attention_backend": found}
    monkeypatch.setattr(WorkerExtensionFL, "fl_candidates", lambda self: candidates)
    bound = {"attention_backend": "vendor.acme"}
    policy = WorkerExtensionFL.fl_set_policy
    monkeypatch.setattr(
        WorkerExtensionFL, "fl_set_policy",
        lambda self, new: {"bound": {**policy(self, new)["bound"], **bound}},
    )  # fmt: skip
    evidence, _ = gather(arena, 0.005, (), lambda text: None)
    attention = evidence.operators["attention_backend"]
    assert attention.excluded == {
        "reference.torch": "plain PyTorch, for which the engine would be restarted"
    }
    assert evidence.space().choices["attention_backend"] == ("vendor.acme", "vendor.other")


def test_attention_that_cannot_serve_the_model_is_left_out_and_what_serves_is_pinned(
    arena, monkeypatch
):
    choices = ["reference.torch", "vendor.acme", "vendor.other",
               "decode:vendor.acme+prefill:vendor.other"]  # fmt: skip
    found = {
        "available": choices, "references": ["reference.torch"], "live": [],
        "unable": {"vendor.acme": "no bfloat16"}, "serves": True,
    }  # fmt: skip
    candidates = {**arena.worker("fl_candidates"), "attention_backend": found}
    monkeypatch.setattr(WorkerExtensionFL, "fl_candidates", lambda self: candidates)
    policy, orders = WorkerExtensionFL.fl_set_policy, []

    def set_policy(self, new):
        orders.append(new["per_op_order"]["attention_backend"])
        return {"bound": {**policy(self, new)["bound"], "attention_backend": "reference.torch"}}

    monkeypatch.setattr(WorkerExtensionFL, "fl_set_policy", set_policy)
    evidence, _ = gather(arena, 0.005, (), lambda text: None)
    why = "vendor.acme cannot serve this model: no bfloat16"
    assert evidence.operators["attention_backend"].excluded == dict.fromkeys(
        ["vendor.acme", "decode:vendor.acme+prefill:vendor.other"], why
    )
    assert evidence.space().choices["attention_backend"] == ("reference.torch", "vendor.other")
    assert orders
    assert {tuple(order) for order in orders} == {("impl:reference.torch", "impl:vendor.other")}


def test_what_only_choices_call_that_are_not_tried_is_left(arena, manager):
    for name in ("fast", "faster_and_wrong", "failing"):
        manager.registry.unregister("gelu_and_mul", f"vendor.acme.{name}")
    manager.registry.register_impl(
        OpImpl("gelu_and_mul", "vendor.acme.also", BackendImplKind.VENDOR,
               lambda x, approximate="none": gelu_slow(x), vendor="acme")
    )  # fmt: skip
    evidence, _ = gather(arena, 0.005, (), lambda text: None)
    assert (
        "vendor.acme.slow or more"
        in (evidence.operators["silu_and_mul"].excluded["vendor.acme.calling"])
    )
    assert evidence.left["gelu_and_mul"] == "only choices that are not tried call it"
    assert evidence.space().choices == {}
