"""``vllm-fl explain OP --model M`` and ``config --model M``, where vLLM makes no configuration."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def refused(*arguments, **environ):
    """Return the lines that the command itself writes to standard error."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
    done = subprocess.run(
        [sys.executable, "-m", "vllm_fl", *map(str, arguments)],
        env={
            **clean,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_FL_PLATFORM": "reference",
            **environ,
        },
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr[done.stderr.index("vllm-fl: ") :].splitlines()


@pytest.mark.parametrize("command", [("explain", "rms_norm"), ("config",)])
def test_a_model_that_is_not_there(command, tmp_path):
    missing = tmp_path / "missing"
    (line,) = refused(*command, "--model", missing)
    assert line.startswith(f"vllm-fl: --model: vLLM cannot be configured for '{missing}' (dtype ")
    assert line.endswith(". Give a folder with a config.json or a model's name.")


def test_a_folder_without_a_model(tmp_path):
    (line,) = refused("explain", "rms_norm", "--model", tmp_path)
    assert f"cannot be configured for '{tmp_path}' (dtype auto): Invalid repository ID or" in line


def test_a_dtype_that_does_not_exist(tiny_model):
    (line,) = refused("explain", "rms_norm", "--model", tiny_model, "--dtype", "nope")
    assert line.startswith("vllm-fl: --dtype: vLLM does not take 'nope': Input should be 'auto', ")


def test_a_device_that_vllm_cannot_be_imported_for(tiny_model, tmp_path):
    (tmp_path / "vllm.py").write_text("raise ImportError('libchip.so: no such file')")
    (line,) = refused("explain", "rms_norm", "--model", tiny_model, PYTHONPATH=str(tmp_path))
    assert line == (
        "vllm-fl: --model needs vLLM, which cannot be imported here: libchip.so: no such file. "
        "VLLM_FL_PLATFORM='reference' chose the device. Leave --model out, or run it where vLLM "
        "starts on that device."
    )


def test_what_vllm_wraps_of_ours_stays_as_it_is(tiny_model):
    (line,) = refused(
        "explain", "rms_norm", "--model", tiny_model, "--dtype", "float32",
        VLLM_FL_STRICT="1", VLLM_FL_OOT_ENABLED="0", VLLM_FL_OOT_BLACKLIST="rms_norm",
    )  # fmt: skip
    assert line == ("vllm-fl: VLLM_FL_OOT_BLACKLIST has no effect: VLLM_FL_OOT_ENABLED is off.")
