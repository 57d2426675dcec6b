"""The backend: light to import, clear about why it is not available, declining to the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_fl.dispatch import OpImpl, OpManager, OpRegistry
from vllm_fl.dispatch.backend import Backend
from vllm_fl_flaggems import availability
from vllm_fl_flaggems.backend import FlagGemsBackend
from vllm_fl_reference.backend import ReferenceBackend
from vllm_fl_reference.ops.activation import silu_and_mul


def test_the_backend_and_its_answer_import_nothing_heavy() -> None:
    code = (
        "import sys; from vllm_fl_flaggems.backend import FlagGemsBackend as B; "
        "B().is_available(); list(B().implementations()); "
        "print([n for n in ('torch', 'triton', 'numpy', 'vllm', 'flag_gems') if n in sys.modules])"
    )
    paths = [p for p in sys.path if p]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        check=True,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert done.stdout.strip() == "[]"


def test_the_operators() -> None:
    impls = list(FlagGemsBackend().implementations())
    assert all(isinstance(impl, OpImpl) for impl in impls)
    assert {impl.impl_id for impl in impls} == {"default.flagos"}
    assert {impl.op_name for impl in impls} == {
        "silu_and_mul",
        "gelu_and_mul",
        "rms_norm",
        "gemma_rms_norm",
        "rotary_embedding",
        "reshape_and_cache_flash",
        "attention_backend",
        "topk_softmax",
        "grouped_topk",
        "moe_align_block_size",
        "moe_sum",
        "fused_experts",
    }


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")


def with_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str) -> None:
    source = tmp_path / "__init__.py"
    source.write_text(f'"""isort:skip_file"""\n{line}\n')
    spec = SimpleNamespace(origin=str(source))
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: spec)


def test_available_in_the_interpreter() -> None:
    assert availability.triton_availability()


def test_triton_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None)
    assert FlagGemsBackend().is_available().reason == "triton is not installed"


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_triton_of_another_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    with_version(monkeypatch, tmp_path, f"__version__ = '{version}'")
    short = version.rpartition(".")[0]
    reason = availability.triton_availability().reason
    assert reason == f"triton {short} is installed, not 3.6 to 3.9"


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1+git0a1b", "3.9.0"])
def test_triton_of_a_tested_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    with_version(monkeypatch, tmp_path, f'__version__ = "{version}"')
    assert availability.triton_availability()


def device(name: str | None) -> SimpleNamespace:
    return SimpleNamespace(device=None if name is None else SimpleNamespace(name=name))


@pytest.mark.parametrize(("name", "available"), [("npu", True), ("cpu", False), (None, False)])
@pytest.mark.usefixtures("compiled")
def test_any_device_of_another_wheel_will_do(
    monkeypatch: pytest.MonkeyPatch, name: str | None, available: bool
) -> None:
    monkeypatch.setattr(availability.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(availability.state, "current_device", lambda: device(name))
    decision = availability.triton_availability()
    assert bool(decision) is available
    assert available or "TRITON_INTERPRET=1" in decision.reason


@pytest.mark.usefixtures("compiled")
def test_device_files_will_do_without_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.state, "current_device", lambda: device(None))
    monkeypatch.setattr(
        availability.glob, "glob", lambda pattern: ["/dev/nvidia3"] if "nvidia" in pattern else []
    )
    assert availability.triton_availability()


@pytest.fixture
def manager() -> Iterator[OpManager]:
    registry = OpRegistry()
    backends: tuple[Backend, ...] = (FlagGemsBackend(), ReferenceBackend())
    for backend in backends:
        registry.register_many(list(backend.implementations()))
    return OpManager(registry, register_builtins=False)


def test_it_comes_before_the_reference(manager: OpManager) -> None:
    for op_name in FlagGemsBackend.operators:
        assert manager.get_selected_impl_id(op_name) == "default.flagos"


def test_what_depends_on_the_batch_is_not_available_where_nothing_may(
    manager: OpManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    selected = {op: manager.get_selected_impl_id(op) for op in FlagGemsBackend.operators}
    others = {op for op, impl_id in selected.items() if impl_id == "reference.torch"}
    assert others == {"topk_softmax", "grouped_topk", "fused_experts"}
    for op_name in others:
        ((impl, decision),) = manager.rank(op_name).rejected
        assert impl.impl_id == "default.flagos"
        assert decision.reason.startswith("VLLM_BATCH_INVARIANT is set")


@pytest.mark.parametrize(
    "x",
    [torch.ones(3, 8, dtype=torch.float64), torch.ones(8, 3).t()],
    ids=["float64", "columns"],
)
def test_what_it_declines_goes_to_the_reference(manager: OpManager, x: torch.Tensor) -> None:
    manager.count_calls()
    out = manager.bind("silu_and_mul")(x)
    assert torch.equal(out, silu_and_mul(x))
    assert manager.counters.calls["silu_and_mul", "reference.torch"] == 1
    assert manager.counters.calls["silu_and_mul", "default.flagos"] == 0


def test_cpu_tensors_are_declined_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl_flaggems.ops import activation, layout

    monkeypatch.setattr(layout, "INTERPRETED", False)
    assert "on the CPU" in str(activation.supports_silu(torch.empty(2, 8)))
