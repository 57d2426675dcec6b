"""Wheels that this project does not control: several, old, broken, replaced, editable."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from overlay import build_wheel, write_project

BACKEND = """
from vllm_fl.dispatch import Backend, Device, Implementation
class B(Backend):
    name = vendor = {name!r}
    operators = {{"gelu_and_mul": Implementation("vllm_fl_{name}.impl:gelu_and_mul")}}
"""
IMPL = "def gelu_and_mul(x, approximate='none'): return [{name!r}, {version!r}, x]\n"
GELU = """
import json; from vllm_fl.dispatch import call_op; print(json.dumps(call_op("gelu_and_mul", 3)))
"""
DEVICE = '    device = Device("npu", "vllm_fl_{name}.platform:P", lambda: True)\n'
PLATFORM = "import vllm_fl; print(vllm_fl.register())"


@pytest.fixture
def project(tmp_path):
    """Write the project of a vendor's wheel."""

    def write(name, *, version="1.0", backend="", impl=IMPL, **more):
        modules = {
            "backend": (BACKEND + backend).format(name=name),
            "impl": impl.format(name=name, version=version),
        }
        folder = tmp_path / f"{name}-{version}"
        return write_project(
            folder, f"vllm-fl-{name}", modules, value="backend:B", version=version, **more
        )

    return write


def called(done):
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_two_vendors_on_one_device(overlay, project):
    overlay.unpack(*(build_wheel(project(name)) for name in ("acme", "bolt")))
    assert {"acme", "bolt"} <= {n for n, row in overlay.backends().items() if row["usable"]}
    for first, second in (("acme", "bolt"), ("bolt", "acme")):
        order = f"gelu_and_mul=vendor:{first}|vendor:{second}"
        found = overlay.decisions("gelu_and_mul", VLLM_FL_PER_OP=order)
        assert found[f"vendor.{first}"] == (f"vllm-fl-{first} 1.0", "chosen")
        assert found[f"vendor.{second}"] == (f"vllm-fl-{second} 1.0", "fall-back 1")
        done = overlay.run("-c", GELU, VLLM_FL_PER_OP=order)
        assert called(done) == f'["{first}", "1.0", 3]'
    done = overlay.run("-c", GELU, VLLM_FL_PREFER="vendor", VLLM_FL_DENY_VENDORS="acme")
    assert called(done) == '["bolt", "1.0", 3]'


def test_a_wheel_for_an_older_core(overlay, project):
    old = project("acme", core="<0.1.0.dev0", backend="    api_version = (0, 9)\n")
    wheel = build_wheel(old)
    refused = overlay.pip("install", "--no-index", wheel)
    assert refused.returncode == 1
    assert "vllm-fl-core<0.1.0.dev0" in refused.stderr

    overlay.unpack(wheel)
    row = overlay.backends()["acme"]
    assert not row["usable"]
    assert row["reason"].endswith(
        "it was written for backend API 0.9, this vllm-fl-core provides 1.0; "
        "install versions that match"
    )
    assert "vendor.acme" not in overlay.decisions("gelu_and_mul")


def test_a_heavy_library_that_its_backend_misses(overlay, project):
    says_so = """
    def is_available(self):
        import importlib.util
        return bool(importlib.util.find_spec("acme_rt")) or "the library acme_rt is not installed"
"""
    overlay.unpack(build_wheel(project("acme", backend=says_so)))
    assert overlay.backends()["acme"]["usable"]
    rows = overlay.fl("explain", "gelu_and_mul", VLLM_FL_PREFER="vendor")["implementations"]
    (row,) = [row for row in rows if row["impl_id"] == "vendor.acme"]
    assert (row["decision"], row["reason"]) == ("refused", "the library acme_rt is not installed")


def test_a_heavy_library_that_shows_at_the_call(overlay, project):
    missing = project("acme", impl="import acme_rt\n" + IMPL)
    overlay.unpack(build_wheel(missing), build_wheel(project("bolt")))
    done = overlay.run("-c", GELU, VLLM_FL_PER_OP="gelu_and_mul=vendor:acme|vendor:bolt")
    assert called(done) == '["bolt", "1.0", 3]'
    assert "No module named 'acme_rt'" in done.stderr
    done = overlay.run("-c", GELU, VLLM_FL_PER_OP="gelu_and_mul=vendor:acme")
    assert done.returncode == 1
    assert "No module named 'acme_rt'" in done.stderr


def test_a_heavy_library_that_shows_at_the_import(overlay, project):
    overlay.unpack(build_wheel(project("acme", backend="import acme_rt\n")))
    row = overlay.backends()["acme"]
    assert (row["usable"], row["reason"]) == (
        False, "it cannot be loaded: ModuleNotFoundError: No module named 'acme_rt'",
    )  # fmt: skip
    assert overlay.backends()["reference"]["usable"]


def test_versions_installed_in_turn(overlay, project):
    wheels = {version: build_wheel(project("acme", version=version)) for version in ("1.0", "2.0")}
    for version in ("1.0", "2.0", "1.0"):
        overlay.install("--no-deps", wheels[version])
        assert overlay.backends()["acme"]["wheel"] == f"vllm-fl-acme {version}"
        done = overlay.run("-c", GELU, VLLM_FL_PREFER="vendor")
        assert called(done) == f'["acme", "{version}", 3]'


def test_an_editable_install(overlay, project):
    source = project("acme")
    overlay.install("--no-deps", "-e", source)
    assert overlay.backends()["acme"]["wheel"] == "vllm-fl-acme 1.0"
    assert called(overlay.run("-c", GELU, VLLM_FL_PREFER="vendor")) == '["acme", "1.0", 3]'
    (source / "vllm_fl_acme" / "impl.py").write_text(IMPL.format(name="edited", version=""))
    assert called(overlay.run("-c", GELU, VLLM_FL_PREFER="vendor")) == '["edited", "", 3]'


@pytest.mark.skipif(not find_spec("vllm"), reason="without vLLM there is no platform")
def test_two_vendors_claim_one_device(overlay, project):
    overlay.unpack(*(build_wheel(project(name, backend=DEVICE)) for name in ("acme", "bolt")))
    done = overlay.run("-c", PLATFORM)
    assert called(done) == "vllm_fl_acme.platform.P"
    assert (
        "Several backends claim this machine: acme is used, not bolt; "
        "VLLM_FL_PLATFORM names another." in done.stderr
    )
    for name in ("acme", "bolt"):
        done = overlay.run("-c", PLATFORM, VLLM_FL_PLATFORM=name)
        assert called(done) == f"vllm_fl_{name}.platform.P"
        assert "Several backends" not in done.stderr
    done = overlay.run("-c", PLATFORM, VLLM_FL_PLATFORM="npu")
    assert called(done) == "vllm_fl.integration.unusable.UnusablePlatform"
