"""Comparison, the operator list, and the counts at exit."""

from __future__ import annotations

import math
import os
import re
import threading

import pytest

from vllm_fl.dispatch import (
    OpManager,
    SelectionPolicy,
    env,
    set_global_policy,
    with_denied_vendors,
)
from vllm_fl.dispatch.compare import Comparison, ComparisonError
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.oplist import OpList, write_atomically

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
OP = "silu_and_mul"


@pytest.fixture
def off_by(manager, impl):
    """A manager whose first choice is off by a given amount, compared with its reference."""

    def make(error, limit=None):
        def fn(x):
            x += error  # in place, which must not reach the yardstick
            return x

        manager.registry.register_many(
            [impl("default.flagos", fn), impl("reference.torch", lambda x: x * 1)]
        )
        manager.comparison = Comparison({OP: "reference"}, limit)
        return manager

    return make


def test_the_largest_difference_of_each_layer(off_by):
    manager = off_by(0.5)
    first, second = manager.bind(OP), manager.bind(OP)
    assert first(torch.tensor([1.0, -4.0])).tolist() == [1.5, -3.5]
    first(torch.tensor([8.0]))
    second(x=torch.tensor([1.0]))
    found = manager.comparison.differences
    assert vars(found[OP, 0]) == {
        "op_name": OP, "number": 0, "calls": 2, "absolute": 0.5, "relative": 0.125,
    }  # fmt: skip
    assert (found[OP, 1].calls, found[OP, 1].relative) == (1, 0.5)


def test_a_limit_stops_the_run_and_nothing_falls_back(off_by):
    manager = off_by(0.5, limit=0.3)
    handle = manager.bind(OP)
    handle(torch.tensor([4.0]))
    with pytest.raises(ComparisonError, match=r"silu_and_mul in layer 0 differs from reference by"):
        handle(torch.tensor([1.0]))
    assert manager.get_failed_impls() == {}


def test_what_an_operator_writes_is_compared(manager, impl):
    def sums(input, output):
        output.copy_(input.sum(1))

    def doubles(input, output):
        output.copy_(2 * input.sum(1))

    manager.registry.register_many(
        [
            impl("default.flagos", doubles, op_name="moe_sum"),
            impl("reference.torch", sums, op_name="moe_sum"),
        ]
    )
    manager.comparison = Comparison({"moe_sum": "reference"}, None)
    output = torch.zeros(2, 4)
    manager.bind("moe_sum")(torch.ones(2, 3, 4), output)
    assert output.unique().tolist() == [6.0]
    assert manager.comparison.differences["moe_sum", 0].absolute == 3.0


def test_caches_are_not_copied_to_compare():
    with pytest.raises(ConfigError, match="updates key_cache, value_cache in place"):
        Comparison({"reshape_and_cache_flash": "reference"}, None)


def test_nan_is_an_infinite_difference_and_nothing_is_none(off_by):
    manager = off_by(math.nan)
    handle = manager.bind(OP)
    handle(torch.zeros(0))
    assert manager.comparison.differences[OP, 0].absolute == 0.0
    handle(torch.ones(1))
    assert manager.comparison.differences[OP, 0].absolute == math.inf


def test_comparison_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_FL_COMPARE", "silu_and_mul=reference, rms_norm=impl:vendor.acme")
    monkeypatch.setenv("VLLM_FL_COMPARE_LIMIT", "1e-3")
    manager = OpManager()
    manager.ensure_initialized()
    assert manager.comparison.yardsticks == {
        "silu_and_mul": "reference", "rms_norm": "impl:vendor.acme",
    }  # fmt: skip
    assert manager.comparison.limit == 1e-3


def test_a_comparison_that_was_set_before_the_first_use_stays():
    manager = OpManager()
    manager.comparison = mine = Comparison({OP: "reference"}, None)
    manager.ensure_initialized()
    assert manager.comparison is mine


def test_the_operator_list_follows_what_is_bound(manager, impl, tmp_path):
    manager.registry.register_many([impl("vendor.acme"), impl("reference.torch")])
    manager.usage.oplist = OpList(tmp_path / "ops.txt")
    handle = manager.bind(OP)
    assert (tmp_path / "ops.txt").read_text() == (
        "[DEBUG] vllm_fl.dispatch.ops.silu_and_mul: vendor.acme\n"
    )
    with with_denied_vendors("acme"):
        manager.bind(OP)
    assert (tmp_path / "ops.txt").read_text().splitlines() == [
        "[DEBUG] vllm_fl.dispatch.ops.silu_and_mul: vendor.acme",
        "[DEBUG] vllm_fl.dispatch.ops.silu_and_mul: reference.torch",
    ]
    assert handle(1)[0] == "vendor.acme"
    assert os.listdir(tmp_path) == ["ops.txt"]


def test_the_operator_list_follows_what_is_called(manager, impl, tmp_path):
    manager.registry.register_many([impl("vendor.acme"), impl("reference.torch")])
    manager.usage.oplist = OpList(tmp_path / "ops.txt")
    manager.resolve(OP)
    assert not (tmp_path / "ops.txt").exists()
    assert manager.call(OP, 1)[0] == "vendor.acme"
    with with_denied_vendors("acme"):
        assert manager.call(OP, 1)[0] == "reference.torch"
    assert (tmp_path / "ops.txt").read_text().split() == [
        "[DEBUG]", "vllm_fl.dispatch.ops.silu_and_mul:", "vendor.acme",
        "[DEBUG]", "vllm_fl.dispatch.ops.silu_and_mul:", "reference.torch",
    ]  # fmt: skip
    assert manager.usage.impl_ids == {OP: {"vendor.acme", "reference.torch"}}


def test_the_operator_list_is_written_without_a_lock_held(manager, impl, tmp_path):
    free = []

    class Watched(OpList):
        def add(self, lines):
            thread = threading.Thread(target=lambda: free.append(is_free(manager.usage._lock)))
            thread.start()
            thread.join()
            super().add(lines)

    def is_free(lock):
        acquired = lock.acquire(timeout=2)
        if acquired:
            lock.release()
        return acquired

    manager.registry.register_many([impl("vendor.acme"), impl("reference.torch")])
    manager.usage.oplist = Watched(tmp_path / "ops.txt")
    manager.bind(OP)
    assert free == [True]


def test_each_rank_has_its_file(tmp_path):
    oplist = OpList(tmp_path / "ops.txt")
    oplist.rank = 3
    oplist.note(OP, "reference.torch")
    assert os.listdir(tmp_path) == ["ops.txt.rank3"]


def test_a_link_is_replaced_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = tmp_path / "ops.txt"
    link.symlink_to(victim)
    write_atomically(link, "new")
    assert victim.read_text() == "precious"
    assert link.read_text() == "new"
    assert not link.is_symlink()
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert link.stat().st_mode == ordinary.stat().st_mode


def test_a_list_that_cannot_be_written_stops_nothing(manager, impl, tmp_path, log):
    manager.registry.register_impl(impl("reference.torch"))
    manager.usage.oplist = OpList(tmp_path / "missing" / "ops.txt")
    assert manager.bind(OP)(1)[0] == "reference.torch"
    assert "cannot be written" in log[0].getMessage()


@pytest.mark.parametrize("name", ["VLLM_FL_OPLIST", "FLAGGEMS_ENABLE_OPLIST_PATH"])
def test_the_list_from_the_environment(monkeypatch, tmp_path, name):
    monkeypatch.setenv(env.FLAGGEMS_OPLIST.name, str(tmp_path / "old"))
    monkeypatch.setenv(name, str(tmp_path / "ops"))
    manager = OpManager()
    manager.ensure_initialized()
    assert manager.usage.oplist.path == tmp_path / "ops"


def test_counts_are_printed_at_exit_in_debug_mode(wheels):
    wheels.add(
        "acme",
        "from vllm_fl.dispatch import Backend\n"
        "class B(Backend):\n"
        "    name = vendor = 'acme'\n"
        "    def silu_and_mul(self, x): raise ArithmeticError('boom')\n"
        "    def gelu_and_mul(self, x, approximate='none'): return x\n",
    )
    code = """
from vllm_fl.dispatch import OpImpl, BackendImplKind, call_op, get_default_manager
m = get_default_manager(); m.ensure_initialized()
m.registry.register_impl(OpImpl("silu_and_mul", "reference.mine", BackendImplKind.REFERENCE,
                                lambda x: x, priority=99))
for _ in range(3): call_op("silu_and_mul", 1); call_op("gelu_and_mul", 1)
"""
    noisy = wheels.process(code, VLLM_FL_DISPATCH_DEBUG="1").stderr
    assert "gelu_and_mul: vendor.acme ran 3 times, declined 0, fell back 0" in noisy
    assert "silu_and_mul: vendor.acme ran 1 times, declined 0, fell back 1" in noisy
    assert "silu_and_mul: reference.mine ran 3 times" in noisy
    assert "gelu_and_mul -> vendor.acme (acme 1.0); then reference.torch" in noisy
    assert "ran" not in wheels.process(code).stderr.replace("vllm_fl", "")


def test_a_failing_yardstick_blames_itself(manager, impl):
    def fail(x):
        raise ArithmeticError("boom")

    manager.registry.register_many([impl("default.flagos"), impl("reference.torch", fail)])
    manager.comparison = Comparison({OP: "reference"}, None)
    with pytest.raises(ComparisonError, match="cannot be compared with reference, which raised"):
        manager.bind(OP)(torch.ones(1))
    assert manager.get_failed_impls() == {}


def test_a_compared_implementation_still_declines_and_falls_back(manager, impl):
    def fail(x):
        raise ArithmeticError("boom")

    manager.registry.register_many(
        [
            impl("default.flagos", supports=lambda x: "never"),
            impl("vendor.acme", fail),
            impl("reference.torch", lambda x: x * 1),
        ]
    )
    manager.comparison = Comparison({OP: "reference"}, None)
    assert manager.bind(OP)(torch.ones(1)).tolist() == [1.0]
    assert list(manager.get_failed_impls()[OP]) == ["vendor.acme"]


def test_nothing_is_compared_with_itself_and_equal_infinities_are_equal(manager, impl):
    manager.registry.register_many(
        [impl("vendor.acme", lambda x: x / 0), impl("reference.torch", lambda x: x / 0)]
    )
    manager.comparison = Comparison({OP: "reference"}, 0.0)
    assert manager.bind(OP)(torch.ones(1)).isinf().all()
    manager.comparison = Comparison({OP: "vendor"}, 0.0)
    handle = manager.bind(OP)
    assert handle.fn is manager.resolve(OP)


def test_a_yardstick_is_not_run_on_what_it_does_not_take(manager, impl):
    taken = []
    manager.registry.register_many(
        [
            impl("default.flagos", lambda x: x * 1),
            impl("reference.torch", taken.append, supports=lambda x: x.ndim == 2 or "a row"),
        ]
    )
    manager.comparison = Comparison({OP: "reference"}, None)
    with pytest.raises(
        ComparisonError, match="with reference, which does not take the call: a row"
    ):
        manager.bind(OP)(torch.ones(1))
    assert (taken, manager.get_failed_impls()) == ([], {})


@pytest.mark.parametrize(
    ("answer", "shapes"),
    [
        (lambda x: x[:1], r"\[1\]"),  # which would fit the other by broadcasting
        (lambda x: x[:2], r"\[2\]"),
        (lambda x: (x, x), r"\[3\], \[3\]"),
        (lambda x: None, "nothing"),
    ],
)
def test_a_result_of_another_shape_stops_the_run_and_nothing_falls_back(
    manager, impl, answer, shapes
):
    manager.registry.register_many(
        [impl("default.flagos", answer), impl("reference.torch", lambda x: x * 1)]
    )
    manager.comparison = Comparison({OP: "reference"}, None)
    said = rf"^silu_and_mul in layer 0 gave {shapes}, reference \[3\]: shapes that cannot"
    with pytest.raises(ComparisonError, match=said):
        manager.bind(OP)(torch.ones(3))
    assert manager.get_failed_impls() == {}


def test_what_is_bound_may_be_asked_while_a_handle_is_bound(manager, impl):
    asked = []

    def probe():
        asked.append(manager.bound())
        return True

    manager.registry.register_many(
        [impl("default.flagos"), impl("reference.torch", available=probe)]
    )
    manager.comparison = Comparison({OP: "reference"}, None)
    set_global_policy(SelectionPolicy.from_dict(per_op_order={OP: ["flagos"]}))
    assert manager.bind(OP).impl.impl_id == "default.flagos"
    assert asked == [set()]


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("vendor:acme", "vendor.acme: no device"),
        ("impl:vendor.broken", "Cannot import 'no_such_module'"),
        ("impl:mine", "the order for silu_and_mul is impl:mine"),
    ],
)
def test_without_a_yardstick_the_layer_says_who_asked_for_it(manager, impl, token, reason):
    manager.registry.register_many(
        [
            impl("vendor.acme", available=lambda: "no device"),
            impl("vendor.broken", "no_such_module:f"),
            impl("default.flagos"),
        ]
    )
    manager.comparison = Comparison({OP: token}, None)
    handle = manager.bind(OP)
    with pytest.raises(ConfigError) as caught:
        handle(1)
    said = f"VLLM_FL_COMPARE: nothing to compare silu_and_mul with ({token}). "
    assert str(caught.value).startswith(said)
    assert reason in str(caught.value)
    assert manager.get_failed_impls() == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rmsnorm=reference", "Did you mean 'rms_norm'"),
        ("rms_norm=refrence", "Did you mean 'reference'"),
        ("reshape_and_cache_flash=reference", "it updates key_cache, value_cache in place"),
        ("attention_backend=reference", "it chooses a class and computes nothing. Leave it out"),
    ],
)
def test_what_cannot_be_compared_is_an_error_each_time(monkeypatch, text, message):
    monkeypatch.setenv("VLLM_FL_COMPARE", text)
    manager = OpManager()
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"^VLLM_FL_COMPARE: .*{message}"):
            manager.ensure_initialized()


def test_differences_are_printed_at_exit(wheels):
    code = """
import torch
from vllm_fl.dispatch import OpImpl, BackendImplKind, bind_op, get_default_manager
m = get_default_manager(); m.ensure_initialized()
m.registry.register_impl(OpImpl("silu_and_mul", "vendor.acme", BackendImplKind.VENDOR,
                                lambda x: torch.full((1,), 3.0), vendor="acme"))
m.registry.register_impl(OpImpl("silu_and_mul", "reference.mine", BackendImplKind.REFERENCE,
                                lambda x: torch.full((1,), 4.0), priority=99))
bind_op("silu_and_mul")(torch.ones(2))
"""
    done = wheels.process(code, VLLM_FL_COMPARE="silu_and_mul=impl:reference.mine")
    assert done.returncode == 0, done.stderr
    assert (
        "silu_and_mul, layer 0: differs from impl:reference.mine by at most 0.25 of the largest "
        "element (1 absolute) in 1 calls"
    ) in done.stderr


def test_what_was_to_be_compared_and_was_not_is_told_at_exit(wheels):
    code = """
import torch
from vllm_fl.dispatch import OpImpl, BackendImplKind, bind_op, get_default_manager
m = get_default_manager(); m.ensure_initialized()
for op in ("silu_and_mul", "gelu_and_mul"):
    m.registry.register_impl(OpImpl(op, "vendor.acme", BackendImplKind.VENDOR,
                                    lambda x, approximate="none": x, vendor="acme"))
"""
    asked = {
        "VLLM_FL_COMPARE": "silu_and_mul=reference,gelu_and_mul=vendor:acme,rms_norm=reference",
        "VLLM_FL_PREFER": "vendor",
        "VLLM_FL_ALLOW_VENDORS": "acme",
    }
    bound = "silu, *gelu = [bind_op(o) for o in ('silu_and_mul', 'gelu_and_mul', 'gelu_and_mul')]"
    said = [
        line.split("] ")[-1] for line in wheels.process(code + bound, **asked).stderr.split("\n")
    ]
    assert "No layer called rms_norm through vllm-fl: nothing was compared with reference." in said
    (warned,) = [line for line in said if "not compared with itself" in line]
    assert warned.startswith("vendor.acme of gelu_and_mul is not compared with itself: give ")
    ran = "gelu_and_mul: nothing was compared with vendor:acme, which is vendor.acme"
    assert f"{ran}, the implementation that ran." in said
    assert "silu_and_mul, layer 0: never called, nothing was compared with reference." in said
    assert not [line for line in said if "No layer called silu" in line or "called gelu" in line]
    # As in vLLM's own parent process, which runs no operator:
    assert "nothing was compared" not in wheels.process(code, **asked).stderr


FORKED = """
import multiprocessing, os, sys, torch, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of forks while other threads run
from vllm_fl.dispatch import OpImpl, BackendImplKind, bind_op, get_default_manager
m = get_default_manager(); m.ensure_initialized()
m.registry.register_impl(OpImpl("silu_and_mul", "vendor.acme", BackendImplKind.VENDOR,
                                lambda x: x + 1, vendor="acme"))
m.registry.register_impl(OpImpl("silu_and_mul", "reference.mine", BackendImplKind.REFERENCE,
                                lambda x: x, priority=99))
op = bind_op("silu_and_mul")
op(torch.tensor([1.0]))
def run():
    op(torch.tensor([4.0])); op(torch.tensor([8.0])); op(torch.tensor([8.0]))
"""
BY_MULTIPROCESSING = """
child = multiprocessing.get_context("fork").Process(target=run)
child.start(); child.join()
"""
BY_HAND = """
child = os.fork()
if not child:
    run(); sys.exit()
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("fork", [BY_MULTIPROCESSING, BY_HAND])
def test_a_forked_process_reports_what_it_did_itself(wheels, fork):
    done = wheels.process(
        FORKED + fork,
        VLLM_FL_COMPARE="silu_and_mul=impl:reference.mine",
        VLLM_FL_DISPATCH_DEBUG="1",
        VLLM_FL_PER_OP="silu_and_mul=vendor:acme",
    )
    assert done.returncode == 0, done.stderr
    counts = re.findall(r"silu_and_mul: vendor.acme ran (\d) times", done.stderr)
    differences = re.findall(r"layer 0: differs .* at most (\S+) of .* in (\d) calls", done.stderr)
    assert counts == ["3", "1"]
    assert differences == [("0.25", "3"), ("1", "1")]


def test_what_is_gone_by_the_end_is_not_asked(wheels):
    code = """
import gc
from vllm_fl.dispatch.exits import at_exit
class Asked:
    def __init__(self, name): self.name = name
    def report(self): print(self.name)
kept, gone = Asked("kept"), Asked("gone")
at_exit(kept.report); at_exit(gone.report)
del gone; gc.collect()
"""
    assert wheels.process(code).stdout == "kept\n"
