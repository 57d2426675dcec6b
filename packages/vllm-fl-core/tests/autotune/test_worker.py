"""What the tuner's methods in a worker are made of: recorded calls, timings, graphs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from vllm_fl.dispatch import BackendImplKind, OpImpl, OpManager  # noqa: E402
from vllm_fl.dispatch.ops import CATALOGUE  # noqa: E402
from vllm_fl.integration import recording  # noqa: E402
from vllm_fl.integration.graphs import GraphCache  # noqa: E402
from vllm_fl.integration.recording import (  # noqa: E402
    Recorder,
    copied,
    overwritten_copied,
    time_call,
)


def donating(x, residual, weight, epsilon):
    residual += x
    x.copy_(residual * weight)
    return x, residual


NORM = OpImpl("rms_norm", "vendor.acme", BackendImplKind.VENDOR, donating, vendor="acme")


def call():
    return (torch.arange(6.0).reshape(2, 3), torch.ones(2, 3), torch.full((3,), 2.0), 1e-6), {}


def test_calls_are_counted_timed_and_kept_as_they_were():
    weight = torch.full((3,), 2.0)
    wanted = "(float32[2, 3] on cpu, float32[2, 3] on cpu, float32[3] on cpu, 1e-06)"
    recorder = Recorder({weight.untyped_storage().data_ptr()}, {"rms_norm": [wanted]})
    manager = OpManager(register_builtins=False)
    manager.registry.register_impl(NORM)
    handle = manager.bind("rms_norm")
    manager.observe(recorder)
    for rows in (2, 2, 4):
        handle(torch.ones(rows, 3), torch.ones(rows, 3), weight, 1e-6)
    manager.observe(None)
    handle(torch.ones(2, 3), torch.ones(2, 3), weight, 1e-6)
    (two, four) = recorder.calls["rms_norm"].values()
    assert (two[0], four[0]) == (2, 1)
    assert min(two[1], four[1]) > 0
    ((args, _),) = recorder.kept["rms_norm"].values()
    assert list(recorder.kept["rms_norm"]) == [wanted]
    assert torch.equal(args[1], torch.ones(2, 3))  # before the call added to it
    assert args[2] is weight


def test_timing_changes_no_argument():
    arguments = call()
    before = [tensor.clone() for tensor in arguments[0][:3]]
    times = time_call("rms_norm", donating, arguments, samples=5, limit=10)
    assert len(times) == 5
    assert all(time > 0 for time in times)
    assert all(map(torch.equal, before, arguments[0][:3]))
    assert len(time_call("rms_norm", donating, arguments, samples=5, limit=0)) == 1


def test_copies_keep_the_layout():
    (x, residual, weight, epsilon), _ = call()
    args, _ = overwritten_copied("rms_norm", ((x.T, residual.T, weight, epsilon), {}))
    assert args[0].stride() == x.T.stride()
    assert torch.equal(args[0], x.T)
    assert args[0].data_ptr() != x.data_ptr()
    assert args[2] is weight


BLOCKS, BLOCK, HEADS, SIZE = 1000, 4, 2, 8


def write(key, value, key_cache, value_cache, slot_mapping):
    for new, cache in ((key, key_cache), (value, value_cache)):
        for token, slot in zip(new, slot_mapping.tolist(), strict=False):
            if slot >= 0:
                cache[slot // BLOCK, slot % BLOCK] = token


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 0, 2, 3, 4), (0, 1, 3, 2, 4)])
def test_of_a_cache_only_the_blocks_that_are_written_are_kept(order):
    """Keys and values are the halves of one tensor, of each block or of all; heads in or out."""
    sizes = (BLOCKS, 2, BLOCK, HEADS, SIZE)
    cache = torch.rand([sizes[i] for i in order]).permute([order.index(i) for i in range(5)])
    before = cache.clone()
    halves = cache.unbind(1)
    new = [torch.rand(6, HEADS, SIZE) for _ in halves]
    slots = torch.tensor([9 * BLOCK + 3, 7 * BLOCK, -1, 7 * BLOCK + 2, 999 * BLOCK])
    args, kwargs = copied("reshape_and_cache_flash", (tuple(new), {
        "key_cache": halves[0], "value_cache": halves[1], "slot_mapping": slots,
    }), ())  # fmt: skip
    kept = args[2:4]
    times = time_call("reshape_and_cache_flash", write, (args, kwargs), samples=2, limit=10)
    assert len(times) == 2
    assert torch.equal(cache, before)
    write(*new, *halves, slots)
    for half, copy in zip(halves, kept, strict=True):
        assert torch.equal(copy, half[[0, 7, 9, 999]])  # 0 for what has no slot
        assert copy.stride() == half.stride()
        assert copy.untyped_storage().nbytes() <= 4 * half.stride(0) * half.element_size()


def test_what_is_updated_is_a_paged_cache_with_slots():
    updating = [spec for spec in CATALOGUE.values() if spec.updated]
    assert updating
    assert all("slot_mapping" in spec.signature.parameters for spec in updating)


def test_a_call_that_is_kept_is_copied_once(monkeypatch):
    made = []

    def counted(op_name, call, shared):
        made.append(op_name)
        return copied(op_name, call, shared)

    monkeypatch.setattr(recording, "copied", counted)
    wanted = "(float32[2, 3] on cpu, float32[2, 3] on cpu, float32[3] on cpu, 1e-06)"
    function = Recorder((), {"rms_norm": [wanted]})(NORM, donating)
    for _ in range(5):
        (args, kwargs) = call()
        function(*args, **kwargs)
    assert made == ["rms_norm"]


class Runner:
    """A model runner that captures graphs of two sizes for what is in force."""

    def __init__(self):
        self.cudagraph_manager, self.captures = self, 0
        self.graphs = {}
        self.in_force = ""

    def capture_model(self):
        assert not self.graphs
        self.captures += 1
        self.graphs.update({size: f"{self.in_force} {size}" for size in (1, 2)})

    def use(self, cache, policy):
        self.in_force = policy
        captured = cache.switch(policy)
        assert self.graphs == {size: f"{policy} {size}" for size in (1, 2)}
        return captured


def test_graphs_of_the_last_policies_are_kept():
    runner = Runner()
    runner.in_force = "default"
    runner.capture_model()
    cache = GraphCache(runner, "default", keep=2)
    answers = [runner.use(cache, p) for p in ("default", "a", "default", "a", "default", "b")]
    assert answers == [False, True, False, False, False, True]
    # Kept are the two that were used before.
    assert not runner.use(cache, "default")
    assert not runner.use(cache, "a")
    assert runner.use(cache, "c")
    assert runner.captures == 4


def test_pieces_between_breaks_are_captured_anew_too():
    runner = Runner()
    runner.capture_model()
    runner.breakable_cg_runner = SimpleNamespace(entries={8: "default"})
    cache = GraphCache(runner, "default")
    assert runner.use(cache, "a")
    assert runner.breakable_cg_runner.entries == {}
    runner.in_force = ""
    assert not cache.switch("default")
    assert runner.breakable_cg_runner.entries == {8: "default"}


def test_an_engine_without_graphs_captures_none():
    runner = Runner()
    cache = GraphCache(runner, "default")
    assert not cache.switch("a")
    assert runner.captures == 0
