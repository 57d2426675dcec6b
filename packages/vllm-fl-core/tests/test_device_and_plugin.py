"""The choice of the device, and what the vLLM entry points answer."""

from __future__ import annotations

import pytest

from vllm_fl.dispatch import Backend, ConfigError, Decision, Device, discovery, state
from vllm_fl.dispatch.device import choose_device
from vllm_fl.dispatch.discovery import DiscoveredBackend


def offer(name, answer=True, rank=100):
    def detect():
        if isinstance(answer, Exception):
            raise answer
        return answer

    backend = type("B", (Backend,), {"name": name, "device": Device("d", "p:C", detect, rank=rank)})
    return DiscoveredBackend(name, "test", backend=backend())


def test_the_highest_rank_present_wins():
    choice = choose_device([offer("cpu", rank=0), offer("npu", "no driver"), offer("gpu")])
    assert choice.backend == "gpu"
    assert choice.claims["npu"] == Decision.no("no driver")
    assert choice.rivals == []
    assert choose_device([offer("cpu", rank=0), offer("gpu", False)]).backend == "cpu"


def test_equal_claims_are_ordered_by_name_and_listed():
    for order in (["b", "a", "c"], ["c", "b", "a"]):
        choice = choose_device([offer(name) for name in order])
        assert choice.backend == "a"
        assert choice.rivals == ["b", "c"]


def test_a_detection_that_raises_is_a_no_with_its_reason():
    choice = choose_device([offer("gpu", OSError("nvml"))])
    assert choice.backend is None
    assert choice.reasons() == "gpu: its detection raised OSError: nvml"


def test_the_user_s_word_decides():
    backends = [offer("gpu"), offer("cpu", rank=0)]
    assert choose_device(backends, "cpu").backend == "cpu"
    absent = choose_device([offer("npu", "no driver"), *backends], "npu")
    assert (absent.backend, absent.present) == ("npu", Decision.no("no driver"))
    with pytest.raises(ConfigError, match=r"VLLM_FL_PLATFORM='gpuu' .* Did you mean 'gpu'"):
        choose_device(backends, "gpuu")
    broken = offer("npu")
    broken.reject("it cannot be loaded: OSError: libnpu.so")
    with pytest.raises(ConfigError, match=r"npu: it cannot be loaded: OSError: libnpu\.so"):
        choose_device([*backends, broken], "npu")
    operators = DiscoveredBackend("ops", "test", backend=type("B", (Backend,), {"name": "ops"})())
    with pytest.raises(ConfigError, match=r"ops: it brings no device\. Allowed: cpu, gpu\."):
        choose_device([*backends, operators], "ops")


PLATFORM = "import json, vllm_fl; print(json.dumps(vllm_fl.register()))"
REFUSED = """
import json, vllm_fl
from vllm_fl.dispatch.types import load_object
name = vllm_fl.register()
assert name == vllm_fl.register() == "vllm_fl.integration.unusable.UnusablePlatform", name
try:
    load_object(name.replace(".UnusablePlatform", ":UnusablePlatform"))()
except Exception as error:
    print(json.dumps(str(error)))
"""
BACKEND = """
from vllm_fl.dispatch import Backend, Device
class B(Backend):
    name = {name!r}
    vendor = {name!r}
    device = Device("cpu", "{name}_platform:P", lambda: {answer}, rank={rank})
"""


@pytest.fixture
def vllm(wheels):
    """Metadata of a vLLM, which shadows an installed one."""

    def install(version):
        info = wheels.path / f"vllm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        return wheels

    return install


@pytest.mark.parametrize("version", ["0.26.0", "0.28.1rc1", "0.33.2"])
def test_register_names_the_platform(vllm, version):
    wheels = vllm(version)
    wheels.add("acme", BACKEND.format(name="acme", answer=True, rank=100))
    assert wheels.python(PLATFORM) == "acme_platform.P"


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0"])
def test_an_unsupported_vllm_gets_one_clear_sentence(vllm, version):
    sentence = vllm(version).python(REFUSED)
    assert sentence.startswith(f"vLLM {version} is not supported by this vllm-fl, which works with")
    assert "0.26 to 0.33" in sentence
    assert "VLLM_PLUGINS=''" in sentence


def test_faults_that_vllm_would_swallow_are_raised_by_the_platform(vllm, tmp_path):
    wheels = vllm("0.28.0")
    assert "VLLM_FL_PREFER='flagoss'" in wheels.python(REFUSED, VLLM_FL_PREFER="flagoss")
    assert "no such file" in wheels.python(REFUSED, VLLM_FL_CONFIG=str(tmp_path / "no.yaml"))
    assert "VLLM_FL_PLATFORM='npu'" in wheels.python(REFUSED, VLLM_FL_PLATFORM="npu")
    named = wheels.python(REFUSED, VLLM_FL_PLUGIN_MODULES="no_such")
    assert "VLLM_FL_PLUGIN_MODULES names 'no_such'" in named


def test_two_claims_are_reported_and_the_variable_decides(vllm):
    wheels = vllm("0.28.0")
    for name in ("acme", "bolt"):
        wheels.add(name, BACKEND.format(name=name, answer=True, rank=100))
    done = wheels.process(PLATFORM)
    assert '"acme_platform.P"' in done.stdout
    assert "Several backends claim this machine: acme is used, not bolt" in done.stderr
    assert wheels.python(PLATFORM, VLLM_FL_PLATFORM="bolt") == "bolt_platform.P"


NAMED = "VLLM_FL_PLATFORM='acme': the backend 'acme' has no device on this machine: no driver. "


def test_a_device_that_is_named_and_not_there(vllm):
    wheels = vllm("0.28.0")
    wheels.add("acme", BACKEND.format(name="acme", answer="'no driver'", rank=100))
    wheels.add("bolt", BACKEND.format(name="bolt", answer=True, rank=90))
    named = wheels.python(REFUSED, VLLM_FL_PLATFORM="acme")
    advice = "Unset it to run on 'cpu' (backend 'bolt')."
    assert named.startswith(f"{NAMED}{advice} Cannot import 'acme_platform' (for ")
    (wheels.path / "acme_platform.py").write_text("class P: pass")
    done = wheels.process(PLATFORM, VLLM_FL_PLATFORM="acme")
    assert '"acme_platform.P"' in done.stdout
    assert f"{NAMED}{advice} vLLM goes on, since it was named." in done.stderr
    assert wheels.python(PLATFORM) == "bolt_platform.P"


def test_a_device_that_is_named_where_there_is_none(monkeypatch):
    monkeypatch.setenv("VLLM_FL_PLATFORM", "acme")
    monkeypatch.setattr(discovery, "get_discovered_plugins", lambda: (offer("acme", "no driver"),))
    assert state.absent_device() == (
        f"{NAMED}No other backend has one here; pip install vllm-fl-reference for the CPU."
    )


def test_importing_the_entry_point_imports_nothing_heavy(wheels):
    loaded = wheels.python(
        "import json, sys, vllm_fl;"
        "print(json.dumps([m for m in sys.modules if m.startswith('vllm_fl.') or m == 'logging']))"
    )
    assert loaded == []


def test_a_device_s_name_will_do_where_one_backend_brings_it():
    gpu, cpu = offer("acme"), offer("reference", rank=0)
    cpu.backend.__class__.device = Device("cpu", "p:C", lambda: True, rank=0)
    assert choose_device([gpu, cpu], "cpu").backend == "reference"


@pytest.mark.parametrize(
    ("file", "environ", "message"),
    [
        (b"\xff\xfe", {}, "cannot be read"),
        (b"prefer: 2024-13-45", {}, "is not YAML"),
        (None, {"VLLM_FL_LOG_LEVEL": "loud"}, "VLLM_FL_LOG_LEVEL='loud'"),
    ],
)
def test_no_fault_makes_vllm_go_on_without_a_word(vllm, tmp_path, file, environ, message):
    if file is not None:
        (tmp_path / "fl.yaml").write_bytes(file)
        environ = {"VLLM_FL_CONFIG": str(tmp_path / "fl.yaml")}
    assert message in vllm("0.28.0").python(REFUSED, **environ)


def test_a_vllm_whose_version_cannot_be_read(vllm):
    assert "has no version that can be read" in vllm("dev").python(REFUSED)
