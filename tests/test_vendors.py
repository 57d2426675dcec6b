"""A vendor's first hour, from the template up to vLLM and in the three written steps.

The latter run in vLLM in test_dispatch_in_vllm.py.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from overlay import ROOT, build_wheel

BOLT = Path(__file__).parent / "vendors" / "bolt"
FEW = "(values and bfloat16 or refusal or contract) and not attention"
ACME_OPERATORS = ("silu_and_mul", "rms_norm", "rotary_embedding")


def verified(report: dict) -> set[str]:
    """Return the operators of a report in which everything passed."""
    assert report["passed"], report["failures"]
    assert all(row["passed"] > 10 and not row["failed"] for row in report["operators"].values())
    return set(report["operators"])


def test_from_the_template_to_vllm(overlay, tmp_path):
    project = tmp_path / "acme"
    options = ("--import-name", "vllm_fl_acme", "--with-attention", "--with-platform")
    overlay.fl("new-backend", "acme", *options, "--out", project)
    overlay.install(build_wheel(project))

    row = overlay.backends()["acme"]
    assert (row["wheel"], row["usable"], row["device"]) == ("vllm-fl-acme 0.1.0", True, "cpu")
    operators = verified(overlay.fl("verify", "acme", "-k", FEW))
    assert operators == {*ACME_OPERATORS, "gelu_and_mul"}
    chosen = overlay.decisions("rms_norm", VLLM_FL_PER_OP="rms_norm=vendor:acme")
    assert chosen["vendor.acme"] == ("vllm-fl-acme 0.1.0", "chosen")

    # The platform is the wheel's, and its acme.yaml puts the vendor first.
    example = ROOT / "examples" / "offline_inference.py"
    arguments = (example, "--max-tokens", "8", "--prompt", "The with statement")
    done = overlay.run(*arguments, VLLM_FL_PLATFORM="acme", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 tokens in" in done.stdout
    assert "vllm_fl_acme.attention.AcmeAttentionBackend" in done.stdout + done.stderr
    table = [line.split() for line in done.stdout.splitlines()]
    calls = {row[0]: row for row in table if row[1:3] == ["vendor.acme", "vllm-fl-acme"]}
    assert all(int(calls[op][4]) > 0 for op in ACME_OPERATORS)


def test_a_template_without_options_is_a_wheel_of_operators(overlay, tmp_path):
    overlay.fl("new-backend", "grace-x", "--out", tmp_path / "new")
    overlay.install(build_wheel(tmp_path / "new"))
    assert overlay.backends()["grace-x"]["device"] is None
    settings = tmp_path / "new" / "src" / "vllm_fl_grace_x" / "grace-x.yaml"
    chosen = overlay.decisions("rms_norm", VLLM_FL_CONFIG=str(settings))
    assert chosen["vendor.grace-x"] == ("vllm-fl-grace-x 0.1.0", "chosen")
    done = overlay.run("-m", "pytest", "-q", "-k", "test_backend or rounding", tmp_path / "new")
    assert done.returncode == 0, done.stdout
    # Its own name is no other package's: the project can be written again, with more options.
    overlay.fl("new-backend", "grace-x", "--with-platform", "--out", tmp_path / "again")


@pytest.fixture
def guide(tmp_path):
    """The project that docs/vendors.md writes by hand, beside a folder with its library."""
    text = (ROOT / "docs" / "vendors.md").read_text()
    (pyproject,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    files = re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.S)
    empty = [(f"vllm_fl_acme/{folder}__init__.py", "") for folder in ("", "impl/")]
    library = ("../library/acme_rt.py", "")
    for name, code in (("pyproject.toml", pyproject), *files, *empty, library):
        target = tmp_path / "guide" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(code)
    return tmp_path / "guide"


def test_the_guide_by_hand_from_an_entry_point(overlay, guide):
    overlay.install(build_wheel(guide))
    assert overlay.backends()["acme"]["usable"]
    chosen = overlay.fl("explain", "silu_and_mul", VLLM_FL_PREFER="vendor")["implementations"]
    (row,) = [row for row in chosen if row["impl_id"] == "vendor.acme"]
    assert (row["decision"], row["reason"]) == ("refused", "acme_rt is not installed")
    env = {"PYTHONPATH": str(guide.parent / "library"), "VLLM_FL_PREFER": "vendor"}
    assert overlay.decisions("silu_and_mul", **env)["vendor.acme"][1] == "chosen"
    assert verified(overlay.fl("verify", "acme", "-k", FEW, **env)) == {"silu_and_mul"}


@pytest.mark.parametrize(
    ("value", "name"), [("backend:AcmeBackend", "acme"), ("register_ops", "vendor.acme")]
)
def test_the_guide_by_hand_from_a_named_module(overlay, guide, value, name):
    path = f"{guide}:{guide.parent / 'library'}"
    env = {"PYTHONPATH": path, "VLLM_FL_PLUGIN_MODULES": f"vllm_fl_acme.{value}"}
    assert f"VLLM_FL_PLUGIN_MODULES={env['VLLM_FL_PLUGIN_MODULES']} vllm-fl verify {name}" in (
        (ROOT / "docs" / "vendors.md").read_text()
    )
    assert verified(overlay.fl("verify", name, "-k", FEW, **env)) == {"silu_and_mul"}


def test_three_written_steps_from_an_entry_point(overlay, tmp_path):
    project = shutil.copytree(BOLT, tmp_path / "bolt")
    overlay.install(build_wheel(project))
    assert overlay.backends()["bolt"]["usable"]
    assert verified(overlay.fl("verify", "bolt", "-k", FEW)) == {"silu_and_mul", "rms_norm"}
    chosen = overlay.decisions("silu_and_mul", VLLM_FL_PER_OP="silu_and_mul=vendor:bolt")
    assert chosen["vendor.bolt"] == ("vllm-fl-bolt 0.3.0", "chosen")


@pytest.mark.parametrize("value", ["vllm_fl_bolt.register_ops", "vllm_fl_bolt.bolt:BoltBackend"])
def test_three_written_steps_from_a_named_module(overlay, value):
    env = {"PYTHONPATH": str(BOLT), "VLLM_FL_PLUGIN_MODULES": value, "VLLM_FL_PREFER": "vendor"}
    (row,) = [row for row in overlay.backends(**env).values() if not row["wheel"]]
    assert row["usable"]
    chosen = overlay.decisions("silu_and_mul", **env)
    assert chosen["vendor.bolt"] == ("", "chosen")
    verified_operators = verified(overlay.fl("verify", "vendor.bolt", "-k", FEW, **env))
    assert verified_operators == {"silu_and_mul", "rms_norm"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vendor"], "'vendor' cannot be a backend's name"),
        (["Acme"], "'Acme' cannot be a backend's name"),
        (["acme", "--import-name", "class"], "'class' cannot be the import name"),
        (["acme", "--import-name", "_"], "'_' cannot be the import name"),
        (["acme", "--import-name", "json"], "Python or an installed package has it"),
        (["acme", "--import-name", "vllm_fl"], "Python or an installed package has it"),
        (["acme", "--import-name", "vllm_fl_reference"], "Python or an installed package has it"),
        (["acme", "--with-attn"], "usage: vllm-fl new-backend"),
        (["acme", "--import-name", "vllm-fl"], "'vllm-fl' cannot be the import name"),
    ],
)
def test_what_cannot_be_written_is_refused(overlay, tmp_path, arguments, message):
    done = overlay.run("-m", "vllm_fl", "new-backend", *arguments, "--out", tmp_path / "new")
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_folder_that_holds_something_is_left_alone(overlay, tmp_path):
    (tmp_path / "mine").write_text("mine")
    done = overlay.run("-m", "vllm_fl", "new-backend", "acme", "--out", tmp_path)
    assert done.returncode == 1
    assert "is not an empty folder" in done.stderr
    assert not (tmp_path / "pyproject.toml").exists()
