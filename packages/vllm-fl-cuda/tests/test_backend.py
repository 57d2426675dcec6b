"""What the wheel says about a machine, asked of a driver that is made up here."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from importlib import metadata
from types import ModuleType

import pytest

from vllm_fl.dispatch.config import load
from vllm_fl.dispatch.config_file import read_resource
from vllm_fl.dispatch.types import Decision
from vllm_fl.integration.custom_ops import CUSTOM_OPS
from vllm_fl_cuda import nvml
from vllm_fl_cuda.backend import CudaBackend

H200, A100 = (9, 0), (8, 0)


class NVMLError(Exception):
    pass


class Driver(ModuleType):
    """The part of pynvml that is used, for GPUs of given compute capabilities."""

    NVMLError = NVMLError

    def __init__(self, *gpus, error=None):
        super().__init__("pynvml")
        self.gpus, self.error, self.open = gpus, error, 0

    def nvmlInit(self):
        if self.error:
            raise NVMLError(self.error)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}abc-def"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "MIG-1":
            raise NVMLError("Not Found")
        return "instance"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, instance):
        assert instance == "instance"
        return 1

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        assert self.open == 1
        return self.gpus[handle]


@pytest.fixture
def machine(monkeypatch):
    """Make this a machine with a driver and CUDA builds of vLLM and torch."""
    versions = {"vllm": "0.26.0", "torch": "2.11.0+cu130"}

    def make(driver, visible=None, **installed):
        monkeypatch.setattr(nvml, "version", {**versions, **installed}.__getitem__)
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        nvml._first_gpu.cache_clear()
        return nvml.detect(), nvml.arch()

    yield make
    nvml._first_gpu.cache_clear()


@pytest.mark.parametrize(
    ("visible", "arch"),
    [(None, 90), ("0", 90), ("1", 80), (" 1,0", 80), ("GPU-1abc", 80), ("GPU-0abc-def", 90),
     ("MIG-1", 80)],
)  # fmt: skip
def test_the_first_visible_gpu_counts(machine, visible, arch):
    driver = Driver(H200, A100)
    assert machine(driver, visible) == (nvml.YES, arch)
    assert driver.open == 0


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", " "])
def test_hidden_gpus_are_not_looked_for(machine, visible):
    decision, arch = machine(None, visible)  # None: importing pynvml would fail
    assert decision.reason == f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
    assert arch is None


@pytest.mark.parametrize("visible", ["2", "GPU-2abc", "MIG-2"])
def test_a_name_of_no_gpu(machine, visible):
    decision, arch = machine(Driver(H200, A100), visible)
    assert not decision
    assert "names none of the 2 GPUs" in decision.reason or "Not Found" in decision.reason
    assert arch is None


def test_no_package_no_driver_no_gpu(machine):
    assert machine(None)[0].reason == "the package nvidia-ml-py is not installed"
    decision, _ = machine(Driver(error="Driver Not Loaded"))
    assert decision.reason == "NVML, the NVIDIA driver's library, says: Driver Not Loaded"
    assert machine(Driver())[0].reason == "the NVIDIA driver reports no GPU"


def test_builds_for_the_cpu(machine):
    decision, _ = machine(Driver(H200), torch="2.11.0+cpu")
    assert decision.reason == "the installed torch 2.11.0+cpu is a build for the CPU"
    assert not machine(Driver(H200), vllm="0.26.0+cpu")[0]


def test_the_real_package_on_this_machine():
    """Whatever this machine is, the answer comes without an exception, and no has a reason."""
    nvml._first_gpu.cache_clear()
    decision = nvml.detect()
    assert decision.accepted or decision.reason


def test_availability_follows_the_device_in_use(machine, monkeypatch):
    machine(Driver(H200))
    monkeypatch.setenv("VLLM_FL_PLATFORM", "cuda")
    assert CudaBackend().is_available()
    monkeypatch.setenv("VLLM_FL_PLATFORM", "reference")
    assert CudaBackend().is_available() == Decision.no("vLLM runs on the device 'cpu' here")


def test_asking_imports_nothing_heavy_and_keeps_cuda_untouched():
    code = """
        import json, sys
        from vllm_fl.dispatch.discovery import get_discovered_plugins
        from vllm_fl.dispatch.state import current_device
        current_device()
        (cuda,) = [b for b in get_discovered_plugins() if b.name == "cuda"]
        assert cuda.decision, cuda
        cuda.backend.is_available()
        print(json.dumps([m for m in ("torch", "vllm", "triton", "numpy") if m in sys.modules]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    ("needs", "arch", "accepted"),
    [({}, 90, True), ({}, 80, True), ({}, 100, False), ({}, 103, False), ({}, 120, True),
     ({"use_mla": True}, 90, False), ({"use_sparse": True}, 90, False)],
)  # fmt: skip
def test_flash_attention_where_vllm_takes_it_first(monkeypatch, needs, arch, accepted):
    from vllm_fl_cuda.ops.attention import attention_backend, attention_backend_supports

    monkeypatch.setattr(nvml, "arch", lambda: arch)
    assert (attention_backend_supports(**needs) is True) is accepted
    module, _, name = attention_backend(**needs).partition(":")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert AttentionBackendEnum.FLASH_ATTN.value == f"{module}.{name}"


def test_the_defaults_leave_what_inductor_fuses_to_vllm():
    defaults = CudaBackend.device.defaults
    config = load(defaults, environ={})
    assert config["prefer"] == "vendor"
    assert [op for op in CUSTOM_OPS if config.oot_decision(op)] == []
    text, _ = read_resource(defaults)
    entries = [line for line in text.splitlines() if line.startswith("  ") and line[-1] != ":"]
    assert all("  # " in line for line in entries), "an entry without a reason"


def test_the_entry_point_names_the_backend():
    (entry,) = metadata.entry_points(group="vllm_fl.backends", name="cuda")
    assert entry.load() is CudaBackend
