from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from vllm_fl.cli import main
from vllm_fl.cli.tables import key_values, table
from vllm_fl.dispatch import get_default_manager, reset_global_policy, set_global_policy
from vllm_fl.dispatch.policy import SelectionPolicy


@pytest.fixture
def acme(impl):
    manager = get_default_manager()
    manager.registry.register_many(
        [impl("vendor.acme"), impl("default.flagos", available=lambda: "no compiler")]
    )
    return manager


def output(capsys, *arguments, status=0):
    assert main(arguments) == status
    return capsys.readouterr().out


def test_list(acme, capsys):
    data = json.loads(output(capsys, "list", "--json"))
    assert "vendor.acme" in data["operators"]["silu_and_mul"]
    assert "vendor.acme" in output(capsys, "list")


def test_explain(acme, capsys, impl):
    acme.registry.register_impl(impl("reference.other"))
    set_global_policy(SelectionPolicy.from_dict(deny_vendors=["acme"]))
    text = output(capsys, "explain", "silu_and_mul")
    assert "silu_and_mul(x: Tensor) -> Tensor" in text
    assert "Order: flagos > vendor > reference; falls back on errors." in text
    data = json.loads(output(capsys, "explain", "silu_and_mul", "--json"))
    rows = {row["impl_id"]: (row["decision"], row["reason"]) for row in data["implementations"]}
    assert rows["vendor.acme"] == ("refused", "vendor acme is denied")
    assert rows["default.flagos"] == ("refused", "no compiler")


def test_explain_shows_defaults(capsys, impl):
    get_default_manager().registry.register_impl(
        impl("vendor.acme", lambda x, approximate="none": x, op_name="gelu_and_mul")
    )
    text = output(capsys, "explain", "gelu_and_mul")
    assert text.startswith("gelu_and_mul(x: Tensor, approximate: str = 'none') -> Tensor\n")


def test_explain_an_unknown_operator(capsys):
    assert main(["explain", "rmsnorm"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("vllm-fl: Unknown operator 'rmsnorm'. Did you mean 'rms_norm'?")


def test_doctor_reports_a_broken_setting_instead_of_failing(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_FL_PREFER", "flagoss")
    reset_global_policy()
    data = json.loads(output(capsys, "doctor", "--json"))
    assert "VLLM_FL_PREFER='flagoss'" in data["error"]
    assert data["environment"] == {"VLLM_FL_PREFER": "flagoss"}
    assert "vllm-fl-core" in data["packages"]
    monkeypatch.delenv("VLLM_FL_PREFER")


def test_doctor_names_unknown_variables(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_FL_PREFERR", "vendor")
    data = json.loads(output(capsys, "doctor", "--json"))
    assert "Did you mean 'VLLM_FL_PREFER'" in data["unknown_variables"]["VLLM_FL_PREFERR"]
    assert data["config"]["prefer"] == {"value": "flagos", "source": "built-in default"}


def test_the_installed_command_and_a_closed_pipe():
    command = os.path.join(os.path.dirname(sys.executable), "vllm-fl")
    done = subprocess.run(
        f"{command} doctor | head -1", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("python: 3.")
    assert done.stderr == ""
    assert subprocess.run([command, "--help"], capture_output=True, check=False).returncode == 0
    assert subprocess.run([command], capture_output=True, check=False).returncode == 2


def test_tables_are_aligned():
    assert table(["a", "bb"], [["1", "2"], ["333", "4"]]) == "a    bb\n---  --\n1    2\n333  4"


def test_key_values_nest():
    text = key_values({"a": 1, "b": {"c": [], "d": [1, {"e": None}]}})
    assert text == "a: 1\nb:\n  c: none\n  d:\n    - 1\n    -\n      e: none"


def test_config_says_where_each_value_came_from(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_FL_PER_OP", "rms_norm=vendor:acme|reference")
    monkeypatch.setenv("VLLM_FL_DENY_VENDORS", "b,c")
    data = json.loads(output(capsys, "config", "--json"))
    assert data["op_backends"] == {
        "value": {"rms_norm": ["vendor:acme", "reference"]},
        "source": "VLLM_FL_PER_OP",
    }
    assert data["prefer"] == {"value": "flagos", "source": "built-in default"}
    lines = {
        line.split()[0]: line.split(maxsplit=1)[1] for line in output(capsys, "config").splitlines()
    }
    assert lines["op_backends"].split() == ["rms_norm=vendor:acme|reference", "VLLM_FL_PER_OP"]
    assert lines["deny_vendors"].startswith("b, c ")
    assert lines["strict"].split()[0] == "false"
    assert json.loads(output(capsys, "config", "--schema"))["type"] == "object"


def test_explain_shows_notes(capsys, impl):
    get_default_manager().registry.register_impl(impl("vendor.acme", note="a kernel of ours"))
    get_default_manager().registry.register_impl(impl("vendor.plain"))
    rows = json.loads(output(capsys, "explain", "silu_and_mul", "--json"))["implementations"]
    notes = {row["impl_id"]: row["note"] for row in rows}
    assert notes["vendor.acme"] == "a kernel of ours"
    assert notes["vendor.plain"] == ""
    text = output(capsys, "explain", "silu_and_mul")
    assert "\n\nvendor.acme: a kernel of ours" in text
    assert "vendor.plain: " not in text


def test_explain_names_what_nothing_has(capsys, impl):
    order = {"silu_and_mul": ["vendor:Acme", "vendor:acme", "impl:mine"]}
    set_global_policy(SelectionPolicy.from_dict(per_op_order=order))
    get_default_manager().registry.register_impl(impl("vendor.acme", vendor="acme"))
    first, second = json.loads(output(capsys, "explain", "silu_and_mul", "--json"))["unmatched"]
    assert first.startswith("No implementation is 'vendor:Acme'. Did you mean 'vendor:acme'?")
    assert second.startswith("No implementation is 'impl:mine'. Allowed: impl:")
    assert first in output(capsys, "explain", "silu_and_mul")


@pytest.mark.parametrize(
    ("variable", "setting"),
    [("VLLM_FL_DENY_VENDORS", "deny_vendors"), ("VLLM_FL_ALLOW_VENDORS", "allow_vendors")],
)
def test_a_vendor_that_nothing_has_is_told(capsys, monkeypatch, impl, log, variable, setting):
    get_default_manager().registry.register_impl(impl("vendor.acme"))
    monkeypatch.setenv(variable, "acne")
    reset_global_policy()
    said = f"{setting}: no backend here is of the vendor 'acne'. Did you mean 'acme'? Allowed: "
    unmatched = json.loads(output(capsys, "explain", "silu_and_mul", "--json"))["unmatched"]
    assert [text for text in unmatched if text.startswith(said)] == unmatched
    assert len(unmatched) == 1
    assert said in output(capsys, "explain", "silu_and_mul")
    assert log == []
    assert " acne " in output(capsys, "config")
    assert [record.getMessage() for record in log] == unmatched
    (unmatched,) = json.loads(output(capsys, "doctor", "--json"))["unmatched"]
    assert unmatched.startswith(said)
    monkeypatch.setenv(variable, "acme")
    reset_global_policy()
    assert json.loads(output(capsys, "explain", "silu_and_mul", "--json"))["unmatched"] == []
    output(capsys, "config")
    assert len(log) == 1
    assert json.loads(output(capsys, "doctor", "--json"))["unmatched"] == []


def test_explain_a_call(capsys, impl):
    pytest.importorskip("torch")
    get_default_manager().registry.register_impl(
        impl("vendor.acme", supports=lambda x: x.shape[-1] % 16 == 0 or "d must divide by 8")
    )
    # Before all others, whichever are installed.
    set_global_policy(SelectionPolicy.from_dict(per_op_order={"silu_and_mul": ["vendor:acme"]}))
    for status, width, decision, reason in (
        (0, 64, "chosen", ""),
        (1, 24, "refused", "d must divide by 8"),
    ):
        arguments = ("explain", "silu_and_mul", "--json", "--args", f"x=bfloat16[8,{width}]")
        rows = json.loads(output(capsys, *arguments, status=status))["implementations"]
        (row,) = (row for row in rows if row["impl_id"] == "vendor.acme")
        assert (row["decision"], row["reason"]) == (decision, reason)


@pytest.mark.parametrize(
    ("op", "argument", "message"),
    [
        ("silu_and_mul", "x", "'x' is not of the form 'parameter=value'"),
        ("silu_and_mul", "y=3", "'y=3': silu_and_mul has no parameter 'y'. Allowed: x."),
        ("rms_norm", "residul=None", "no parameter 'residul'. Did you mean 'residual'? Allowed: "),
        ("silu_and_mul", "x=bfloat17[2]", "'bfloat17' is not a torch dtype"),
        ("silu_and_mul", "x=what", "'what' is neither a tensor like"),
        ("rms_norm", "x=float32[2]", "missing a required argument: 'residual'"),
    ],
)
def test_a_call_that_cannot_be_read(capsys, op, argument, message):
    pytest.importorskip("torch")
    assert main(["explain", op, "--args", argument]) == 1
    assert message in capsys.readouterr().err


def test_a_bare_word_is_a_text_where_the_operator_wants_one(capsys):
    pytest.importorskip("torch")
    arguments = ("explain", "gelu_and_mul", "--args", "x=float8_e4m3fn[8,2]", "approximate=tanh")
    assert "gelu_and_mul" in output(capsys, *arguments)


def test_an_argument_twice_and_a_tensor_too_large(capsys):
    pytest.importorskip("torch")
    assert main(["explain", "silu_and_mul", "--args", "x=float32[2]", "x=float32[4]"]) == 1
    assert main(["explain", "silu_and_mul", "--args", "x=float32[99999999999999999999]"]) == 1
    error = capsys.readouterr().err
    assert "'x' is given twice" in error
    assert "is not a tensor" in error


def test_an_operator_that_nothing_runs(acme, capsys):
    set_global_policy(SelectionPolicy.from_dict(per_op_order={"silu_and_mul": ["vendor:nobody"]}))
    text = output(capsys, "explain", "silu_and_mul", status=1)
    assert text.rstrip().endswith("Nothing runs silu_and_mul under this policy.")
    found = json.loads(output(capsys, "explain", "silu_and_mul", "--json", status=1))
    assert found["chosen"] is None
    data = json.loads(output(capsys, "doctor", "--json"))
    reasons = data["operators_without_implementation"]["silu_and_mul"]
    assert reasons["vendor.acme"] == "the order for silu_and_mul is vendor:nobody"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VLLM_FL_PER_OP", "rms_norm=flagoss", "VLLM_FL_PER_OP: op_backends: Unknown order token"),
        ("VLLM_FL_FLAGOS_BLACKLIST", "rmsnorm", "flagos_blacklist: Unknown operator 'rmsnorm'"),
        ("VLLM_FL_LOG_LEVEL", "loud", "VLLM_FL_LOG_LEVEL='loud'"),
        ("VLLM_FL_COMPARE_LIMIT", "abc", "VLLM_FL_COMPARE_LIMIT='abc'"),
    ],
)
def test_config_refuses_what_the_policy_would(capsys, monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    assert main(["config"]) == 1
    assert message in capsys.readouterr().err


def test_config_under_strict_refuses_unknown_variables(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_FL_STRICT", "1")
    monkeypatch.setenv("VLLM_FL_PREFERR", "vendor")
    assert main(["config"]) == 1
    assert "Unknown environment variable VLLM_FL_PREFERR" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("vllm-fl 0.")


def test_explain_says_where_vllm_keeps_its_layer(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_FL_OOT_BLACKLIST", "rms_norm")
    assert main(["explain", "rms_norm"]) == 0
    assert "vLLM keeps its own layer, which does not ask: rms_norm is in" in capsys.readouterr().out
    assert main(["explain", "silu_and_mul", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layer"] == ""


def test_an_operator_whose_layer_vllm_keeps_needs_nothing_that_runs_it(acme, capsys, monkeypatch):
    set_global_policy(SelectionPolicy.from_dict(per_op_order={"silu_and_mul": ["vendor:nobody"]}))
    monkeypatch.setenv("VLLM_FL_OOT_BLACKLIST", "silu_and_mul")
    text = output(capsys, "explain", "silu_and_mul")
    assert "Nothing runs silu_and_mul under this policy.\n\nvLLM keeps its own layer" in text


@pytest.mark.parametrize("command", [["config"], ["explain", "rms_norm"]])
@pytest.mark.parametrize("name", ["VLLM_FL_OOT_WHITELIST", "VLLM_FL_OOT_BLACKLIST"])
def test_a_list_of_layers_is_checked(command, name, capsys, monkeypatch):
    monkeypatch.setenv(name, "rmsnorm")
    assert main(command) == 1
    assert f"{name}: " in (text := capsys.readouterr().err)
    assert "Did you mean 'rms_norm'" in text
