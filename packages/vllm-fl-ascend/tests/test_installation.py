"""What the wheel says about machines that are made up of files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib import metadata

import pytest
from machine import make_machine, torch_release, use_machine

from vllm_fl.dispatch.config import load
from vllm_fl.dispatch.config_file import read_resource
from vllm_fl_ascend import installation
from vllm_fl_ascend.backend import AscendBackend


def ask(environ, code):
    """Run code in a process of its own on a machine; return what its last line says."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        env={**{k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_complete_machine(tmp_path, monkeypatch):
    use_machine(make_machine(tmp_path), monkeypatch)
    assert installation.detect() == installation.YES
    assert installation.versions() == {
        "driver": "25.2.0",
        "CANN": "8.5.0",
        "CANN home": str(tmp_path / "root/usr/local/Ascend/ascend-toolkit/latest"),
        "torch_npu": torch_release(),
        "torch": metadata.version("torch"),
    }


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"npus": 0}, "there is no NPU: no /dev/davinci0 or other"),
        ({"torch_npu": ""}, "torch_npu is not installed"),
        ({"package": False}, "is broken: its package cannot be found"),
        ({"torch_npu": "2.9.1"}, "torch_npu 2.9.1 is made for torch 2.9, and torch"),
        ({"torch_npu": "2.9.1.post3"}, "torch_npu 2.9.1.post3 is made for torch 2.9"),
        ({"cann": False}, "CANN is missing: it is not in /usr/local/Ascend"),
        ({"libraries": False}, "CANN's libraries are not on LD_LIBRARY_PATH (libhccl.so"),
        ({"driver_library": False}, "the driver's libascend_hal.so is not found: install the"),
    ],
)
def test_what_is_missing_is_told(tmp_path, monkeypatch, machine, reason):
    # The package beside these tests is found without metadata, too; here it must not be.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith("emulator")])
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    use_machine(make_machine(tmp_path, **machine), monkeypatch)
    decision = installation.detect()
    assert not decision
    assert reason in decision.reason
    assert AscendBackend().is_available() == decision


def test_a_later_torch_npu_of_the_same_torch_is_taken(tmp_path, monkeypatch):
    use_machine(make_machine(tmp_path, torch_npu=f"{torch_release()}.post3"), monkeypatch)
    assert installation.detect()


@pytest.mark.parametrize(
    ("visible", "devices", "accepted"),
    [("0", [0], True), ("1,0", [1, 0], True), ("", [], False), ("-1", [], False),
     ("2", [2], False), ("0 # first", [0], True), ("x", [], False)],
)  # fmt: skip
def test_visible_devices(tmp_path, monkeypatch, visible, devices, accepted):
    use_machine(make_machine(tmp_path), monkeypatch)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    assert installation.visible_devices() == devices
    decision = installation.detect()
    assert decision.accepted is accepted
    assert accepted or f"ASCEND_RT_VISIBLE_DEVICES={visible!r}" in decision.reason


def test_what_the_environment_names_goes_before_the_usual_folders(tmp_path, monkeypatch):
    use_machine(make_machine(tmp_path), monkeypatch)
    monkeypatch.setenv("ASCEND_HOME_PATH", "/nowhere")
    assert installation.versions()["CANN home"] is None
    assert "ASCEND_HOME_PATH='/nowhere' is no folder" in installation.detect().reason
    home = tmp_path / "mine"
    (home / "aarch64-linux").mkdir(parents=True)
    (home / "aarch64-linux" / "ascend_toolkit_install.info").write_text("version=8.3.RC1\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    assert installation.versions()["CANN"] == "8.3.RC1"


def test_libraries_that_the_linker_is_told_of_elsewhere(tmp_path, monkeypatch):
    use_machine(make_machine(tmp_path, libraries=False, driver_library=False), monkeypatch)
    folder = tmp_path / "root/opt/npu"
    folder.mkdir(parents=True)
    for name in ("libhccl.so", "libascend_hal.so"):
        (folder / name).touch()
    conf = tmp_path / "root/etc/ld.so.conf.d/npu.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text("# of the driver\n/opt/npu\n")
    assert installation.detect()


CLI = "import sys; from vllm_fl.cli import main; sys.exit(main())"
BROKEN = 'raise ImportError("libascend_hal.so: cannot open shared object file")'


def test_a_torch_npu_that_cannot_be_imported(tmp_path):
    """Its entry point lets every import of torch fail; what needs no torch answers."""
    environ = make_machine(tmp_path, package=False, driver_library=False)
    site = tmp_path / "site"
    (site / "torch_npu").mkdir()
    (site / "torch_npu/__init__.py").write_text(BROKEN)
    (info,) = site.glob("*.dist-info")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")

    def command(*arguments, **more):
        return subprocess.run(
            [sys.executable, "-P", "-c", CLI, *arguments],
            env={**os.environ, **environ, "VLLM_FL_PLUGIN_MODULES": "ascend_on_cpu", **more},
            capture_output=True,
            text=True,
            check=False,
        )

    reason = "the driver's libascend_hal.so is not found"
    listed = command("list")
    assert f"The device cpu of ascend is not used: {reason}" in listed.stdout, listed.stderr
    assert reason in command("explain", "silu_and_mul").stdout
    call = ("explain", "silu_and_mul", "--args", "x=float16[4,8]")
    for arguments in (call, ("verify", "ascend")):
        done = command(*arguments)
        assert done.returncode == 1
        assert done.stderr.startswith("vllm-fl: torch cannot be imported: Failed to load")
        assert done.stderr.rstrip().endswith("libascend_hal.so: cannot open shared object file")
    assert "reference.torch" in command(*call, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout
    done = command("verify", "ascend", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert reason in done.stderr


def test_this_machine():
    """Whatever it is, the answers come without an exception, and a no has a reason."""
    decision = installation.detect()
    assert decision.accepted or decision.reason
    assert set(AscendBackend().facts()) == {
        "driver", "CANN", "CANN home", "torch_npu", "torch",
    }  # fmt: skip


def test_asking_imports_nothing_heavy(tmp_path):
    found = ask(
        {**make_machine(tmp_path), "VLLM_FL_PLUGIN_MODULES": "ascend_on_cpu"},
        """
        import json, sys
        from vllm_fl.dispatch.default import get_default_manager
        from vllm_fl.dispatch.discovery import get_discovered_plugins
        from vllm_fl.dispatch.report import doctor
        from vllm_fl.dispatch.state import current_device
        manager = get_default_manager()
        manager.ensure_initialized()
        chosen = current_device().backend
        (ascend,) = [b for b in doctor(manager)["backends"] if b["name"] == "ascend"]
        heavy = [m for m in ("torch", "torch_npu", "vllm", "numpy") if m in sys.modules]
        print(json.dumps([chosen, manager.rank("rms_norm").order[0].impl_id, ascend["facts"],
                          heavy]))
        """,
    )
    chosen, norm, versions, heavy = found
    assert (chosen, norm, heavy) == ("ascend", "vendor.ascend", [])
    assert versions["CANN"] == "8.5.0"
    assert versions["torch_npu"] == torch_release()


def test_a_machine_without_npus_is_not_disturbed(tmp_path):
    environ = make_machine(tmp_path, npus=0, torch_npu="", package=False, cann=False)
    device, order, reason = ask(
        environ,
        """
        import json
        from vllm_fl.dispatch.default import get_default_manager
        from vllm_fl.dispatch.report import explain
        from vllm_fl.dispatch.state import current_device
        manager = get_default_manager()
        manager.ensure_initialized()
        rows = explain(manager, "rms_norm")["implementations"]
        (ascend,) = [row for row in rows if row["impl_id"] == "vendor.ascend"]
        order = [impl.impl_id for impl in manager.rank("rms_norm").order]
        print(json.dumps([current_device().backend, order, ascend["reason"]]))
        """,
    )
    # Which others take its place depends on what is installed; plain PyTorch always can.
    assert device != "ascend"
    assert "reference.torch" in order
    assert "vendor.ascend" not in order
    assert "there is no NPU" in reason


def test_explain_asks_about_shapes(tmp_path):
    """Its tensors are on no device; neither is that a reason to decline them."""
    code = """
        import json
        from vllm_fl.cli.arguments import parse_call
        from vllm_fl.dispatch.default import get_default_manager
        from vllm_fl.dispatch.ops import get_spec
        from vllm_fl.dispatch.report import explain
        def ask(weight):
            call = parse_call(get_spec("rms_norm"), [
                "x=bfloat16[8,4096]", "residual=None", f"weight={weight}[4096]", "epsilon=1e-6"])
            report = explain(get_default_manager(), "rms_norm", call)
            return [(r["impl_id"], r["decision"], r["reason"]) for r in report["implementations"]]
        print(json.dumps([ask("bfloat16"), ask("float32")]))
    """
    environ = {**make_machine(tmp_path), "VLLM_FL_PLUGIN_MODULES": "ascend_on_cpu"}
    taken, declined = ask(environ, code)
    assert ["vendor.ascend", "chosen", ""] in taken
    reason = "x is torch.bfloat16 and the weight torch.float32"
    assert ["vendor.ascend", "refused", reason] in declined


def test_the_defaults_file_has_reasons():
    defaults = AscendBackend.device.defaults
    config = load(defaults, environ={})
    assert config["prefer"] == "vendor"
    text, _ = read_resource(defaults)
    for block in text.split("\n\n"):
        assert block.startswith("#"), "an entry without a reason"


def test_the_entry_point_names_the_backend():
    (entry,) = metadata.entry_points(group="vllm_fl.backends", name="ascend")
    assert entry.load() is AscendBackend
