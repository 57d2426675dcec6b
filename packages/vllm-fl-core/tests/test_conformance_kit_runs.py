"""The conformance kit as a vendor runs it: pytest, the command line, exclusions."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm_fl_reference")

from vllm_fl.dispatch import reset_default_manager
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.testing.suite import items
from vllm_fl.testing.target import find_target

# Right for silu_and_mul but for one thing: columns come out doubled.
ACME = """
from vllm_fl.dispatch.backend import Backend, Implementation

class B(Backend):
    name = "acme"
    vendor = "acme"
    operators = {{
        "silu_and_mul": Implementation("acme:silu_and_mul", supports="acme:supports"),
    }}
    known_failures = {known_failures}

    def facts(self):
        return {{"driver": "1.2", "toolkit": None}}

def supports(x):
    return "rank 4 is too much" if x.dim() == 4 else True

def silu_and_mul(x):
    from vllm_fl_reference.ops.activation import silu_and_mul
    return silu_and_mul(x) * (1 + (x.stride(-1) > 1))
"""
COLUMNS = "silu_and_mul/values/*-columns"
NOTHING = "silu_and_mul/*/*3-packed"
VERIFY = """
import argparse, sys
from vllm_fl.cli import verify
parser = argparse.ArgumentParser()
parser.add_argument("--json", action="store_true")
verify.add_arguments(parser)
try:
    text, status = verify.run(parser.parse_args({arguments!r}))
except Exception as error:
    text, status = f"{{type(error).__name__}}: {{error}}", 2
print(text)
sys.exit(status)
"""


@pytest.fixture
def acme(wheels):
    def add(known_failures: dict[str, str]) -> None:
        wheels.add("acme", ACME.format(known_failures=known_failures))

    return add


@pytest.fixture
def verify(wheels):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return wheels.process(VERIFY.format(arguments=arguments))

    return run


def test_a_failure_is_reported_with_its_case(acme, verify) -> None:
    acme({})
    done = verify("acme", "-k", "values")
    assert done.returncode == 1, done.stderr
    assert "acme on cpu: 6 cases failed." in done.stdout
    assert "Failed cases of silu_and_mul:" in done.stdout
    assert "silu_and_mul/values/float32-3x24-columns" in done.stdout
    assert "elements are wrong; at (" in done.stdout
    assert "[100%]" in done.stderr  # progress
    assert "operator  " not in done.stderr  # the tables are told once
    assert "\ndriver: 1.2\ntoolkit: none\n" in done.stdout
    commands = "`vllm-fl verify acme --json` and `vllm-fl doctor --json`"
    assert done.stdout.endswith(f"To report this, send what {commands} print.\n")


def test_an_excluded_failure_passes_and_is_reported(acme, verify) -> None:
    acme({COLUMNS: "columns are doubled until 2.1"})
    done = verify("acme", "-k", "values", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["backend"] == "acme"
    assert report["device"] == "cpu"
    assert report["passed"] is True
    assert report["facts"] == {"driver": "1.2", "toolkit": None}
    assert report["operators"]["silu_and_mul"]["excluded"] == 6
    assert report["operators"]["silu_and_mul"]["declined"] == 9
    assert {
        "operator": "silu_and_mul",
        "outcome": "excluded",
        "reason": "columns are doubled until 2.1",
        "cases": 6,
    } in report["reasons"]
    assert "rank 4 is too much" in {reason["reason"] for reason in report["reasons"]}


def test_what_passes_need_not_be_reported(acme, verify) -> None:
    acme({COLUMNS: "columns are doubled until 2.1"})
    done = verify("acme", "-k", "values")
    assert done.returncode == 0, done.stderr
    assert "acme on cpu: passed." in done.stdout
    assert "To report this" not in done.stdout


def test_an_excluded_case_that_passes_fails_the_run(acme, verify) -> None:
    acme({COLUMNS: "doubled", "silu_and_mul/values/*-skewed": "no longer true"})
    done = verify("acme", "-k", "values and (columns or skewed)")
    assert done.returncode == 1
    assert "[XPASS(strict)] no longer true" in done.stdout


@pytest.fixture
def installed(acme, wheels, monkeypatch):
    """Install acme into this process."""

    def install(known_failures: dict[str, str]) -> None:
        acme(known_failures)
        monkeypatch.syspath_prepend(wheels.path)
        monkeypatch.delitem(sys.modules, "acme", raising=False)
        reset_default_manager()

    yield install
    sys.modules.pop("acme", None)


@pytest.mark.parametrize(
    ("known_failures", "message"),
    [
        ({COLUMNS: " "}, "the known failure 'silu_and_mul/values/*-columns' has no reason"),
        ({NOTHING: "why"}, "the known failure 'silu_and_mul/*/*3-packed' matches no case"),
    ],
)
def test_a_wrong_exclusion_is_an_error(installed, known_failures, message) -> None:
    installed(known_failures)
    with pytest.raises(ConfigError, match=f"^acme: {re.escape(message)}"):
        items(find_target("acme"))


def test_what_cannot_be_found_is_an_error(installed) -> None:
    installed({})
    with pytest.raises(ConfigError, match="No backend and no implementation 'acmee'"):
        find_target("acmee")
    with pytest.raises(ConfigError, match="Device 'toaster' cannot be used"):
        find_target("acme", "toaster")


def test_a_selection_of_nothing_is_an_error(acme, verify) -> None:
    acme({})
    done = verify("acme", "-k", "toaster")
    assert done.returncode == 2
    assert "ConfigError: nothing was verified: -k 'toaster' selects no case of acme." in done.stdout


def test_cases_that_fail_alike_are_told_together(wheels, verify) -> None:
    code = ACME.replace('supports="acme:supports"', "").replace(
        "def silu_and_mul(x)", "def silu_and_mul(x, y)"
    )
    wheels.add("acme", code.format(known_failures={}))
    done = verify("acme", "-k", "values and float32")
    assert done.returncode == 1
    assert done.stdout.count("it requires a parameter 'y' that the operator does not have") == 1
    assert re.search(r"silu_and_mul/values/float32\S+ and \d+ more\n", done.stdout)


def test_an_implementation_can_be_named_by_its_id(acme, verify) -> None:
    acme({COLUMNS: "doubled"})
    done = verify("vendor.acme", "-k", "determinism or columns")
    assert done.returncode == 0, done.stderr
    assert "vendor.acme on cpu: passed." in done.stdout


def pytest_process(wheels, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import pytest, sys; sys.exit(pytest.main({['-p', 'no:cacheprovider', *arguments]!r}))"
    return wheels.process(code)


def test_pytest_runs_the_kit_with_its_own_options(acme, wheels, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    acme({COLUMNS: "doubled"})
    options = ("-p", "vllm_fl.testing.plugin", "--pyargs", "vllm_fl.testing", "-k", "values")
    done = pytest_process(wheels, *options, "--fl-backend=acme", "--fl-device=cpu")
    assert done.returncode == 0, done.stdout
    assert "vllm-fl conformance" in done.stdout
    every = int(re.search(r"(\d+) passed", done.stdout)[1])
    named = (*options, "--fl-backend=acme", "--fl-device=cpu")
    done = pytest_process(wheels, *named, "--fl-every=7")
    sample = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert 1 <= sample < every / 6
    done = pytest_process(wheels, *named, "--fl-every=0")
    assert "each 0-th case cannot be run" in done.stdout + done.stderr
    done = pytest_process(wheels, *options)
    assert done.returncode != 0
    assert "Name the backend: pytest -p vllm_fl.testing.plugin" in done.stdout + done.stderr
    done = pytest_process(wheels, "--pyargs", "vllm_fl.testing")
    assert done.returncode == 0
    assert "1 skipped" in done.stdout


def test_a_vendors_own_test_file_is_two_lines(acme, wheels, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    acme({COLUMNS: "doubled"})
    (tmp_path / "test_conformance.py").write_text(
        "from vllm_fl.testing.suite import conformance_test\n"
        'test_conformance = conformance_test("acme")\n'
    )
    done = pytest_process(wheels, "test_conformance.py", "-k", "values")
    assert done.returncode == 0, done.stdout
    assert "6 xfailed" in done.stdout


def test_the_dispatcher_does_not_import_the_kit(wheels) -> None:
    code = (
        "import json, sys, vllm_fl.dispatch, vllm_fl.cli.verify; "
        "print(json.dumps([m for m in ('torch', 'pytest', 'vllm_fl.testing') if m in sys.modules]))"
    )
    assert wheels.python(code) == []
