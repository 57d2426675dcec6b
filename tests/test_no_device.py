"""Commands that start vLLM where the device is not there: a sentence, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

PLATFORM = "from vllm.platforms.cpu import CpuPlatform as P\n"
BACKEND = """
from vllm_fl.dispatch import Backend, Device
class B(Backend):
    name = vendor = "acme"
    device = Device("chip", "{platform}:P", lambda: {answer})
"""


@pytest.fixture
def machine(tmp_path):
    """Run a command with a backend whose detection gives an answer, and its platform."""

    def run(*arguments, answer, platform=PLATFORM, named="acme", **environ):
        (tmp_path / "plug.py").write_text(BACKEND.format(answer=answer, platform="chip_platform"))
        (tmp_path / "chip_platform.py").write_text(platform)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
        return subprocess.run(
            [sys.executable, "-m", "vllm_fl", *map(str, arguments)],
            env={
                **clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path),
                "VLLM_FL_PLUGIN_MODULES": "plug:B", "VLLM_FL_PLATFORM": named, **environ,
            },
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    return run


def sentence(done):
    """Return the lines of the error that the command ended with."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr[done.stderr.rindex("vllm-fl: ") :].splitlines()


COMMANDS = [
    ("profile",),
    ("explain", "rms_norm", "--model"),
    ("config", "--model"),
    pytest.param(
        ("autotune", "--workload", "smoke", "--model"),
        marks=pytest.mark.skipif(not find_spec("optuna"), reason="tuning needs Optuna"),
    ),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_named_device_that_is_not_there(machine, tiny_model, command):
    platform = "import libchip_bindings"
    line, *_ = sentence(machine(*command, tiny_model, answer="'no driver'", platform=platform))
    assert line.startswith(
        "vllm-fl: VLLM_FL_PLATFORM='acme': the backend 'acme' has no device on this machine: no "
        "driver. Unset it to run on '"
    )
    assert line.endswith(" ModuleNotFoundError: No module named 'libchip_bindings'.")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_platform_that_cannot_be_imported(machine, tiny_model, command):
    platform = "import libchip_bindings"
    line, *_ = sentence(machine(*command, tiny_model, answer=True, platform=platform))
    assert (
        "needs vLLM, which cannot be imported here: No module named 'libchip_bindings'. "
        "VLLM_FL_PLATFORM='acme' chose the device." in line
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_no_device_for_vllm_alone(machine, tiny_model, command):
    done = machine(
        *command, tiny_model, answer=True, named="reference", VLLM_PLUGINS="",
        CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    line, *_ = sentence(done)
    assert "needs a device, and vLLM finds none here: it runs without vllm-fl, which has " in line


def test_what_is_said_without_starting_vllm(machine):
    listed = machine("list", answer="'no driver'").stdout
    assert "The device chip of acme was not detected: no driver" in listed
    report = machine("doctor", answer="'no driver'").stdout
    assert "backend: acme\n  refused:\n    acme: no driver" in report
