"""Orders by phase: how they are written, what they choose, and what is told about it."""

from __future__ import annotations

import json

import pytest

from vllm_fl.cli.main import main
from vllm_fl.dispatch import (
    BackendImplKind,
    ConfigError,
    OpImpl,
    SelectionPolicy,
    UnknownOperatorError,
    get_default_manager,
    set_global_policy,
)
from vllm_fl.dispatch import config as configuration
from vllm_fl.dispatch.config_file import json_schema
from vllm_fl.dispatch.oplist import OpList
from vllm_fl.dispatch.phases import (
    flat_orders,
    join_choice,
    lay_orders,
    nested_orders,
    split_choice,
    split_name,
)
from vllm_fl.dispatch.report import explain, operator_table

OP = "attention_backend"
APART = {f"{OP}.decode": ("flagos",), f"{OP}.prefill": ("vendor", "flagos")}


@pytest.fixture
def two(manager):
    """A manager with two implementations of attention."""

    def attention(use_mla=False, use_sparse=False):
        return "package:Class"

    for impl_id, kind, vendor in (
        ("default.flagos", BackendImplKind.DEFAULT, None),
        ("vendor.acme", BackendImplKind.VENDOR, "acme"),
    ):
        manager.registry.register_impl(
            OpImpl(OP, impl_id, kind, attention, vendor=vendor, distribution="w", version="1")
        )
    return manager


@pytest.mark.parametrize(
    "text",
    [
        "op_backends: {attention_backend: {decode: [flagos], prefill: [vendor, flagos]}}",
        "op_backends: {attention_backend: {prefill: vendor | flagos, decode: flagos}}",
    ],
)
def test_in_a_file(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    loaded = configuration.load(environ={"VLLM_FL_CONFIG": str(path)})
    assert loaded.policy().per_op_order_dict == APART


def test_in_the_environment_and_in_python():
    text = f"{OP}.decode=flagos;{OP}.prefill=vendor|flagos"
    loaded = configuration.load(environ={"VLLM_FL_PER_OP": text}).policy()
    nested = {OP: {"decode": ["flagos"], "prefill": ["vendor", "flagos"]}}
    assert loaded == SelectionPolicy.from_dict(per_op_order=nested)
    assert loaded.per_op_order_dict == APART
    assert SelectionPolicy.from_dict(**loaded.to_dict()) == loaded
    assert loaded.fingerprint() != SelectionPolicy().fingerprint()


@pytest.mark.parametrize(
    ("orders", "error", "message"),
    [
        ({"rms_norm": {"decode": ["flagos"]}}, ConfigError,
         r"rms_norm cannot differ by phase .*one compiled graph serves decode and prefill. "
         r"Give one order, rms_norm: \[flagos\]. By phase: attention_backend."),
        ({OP: {"decod": ["flagos"]}}, ConfigError, "no phase 'decod'. Did you mean 'decode'"),
        ({OP: {}}, ConfigError, "attention_backend: no phase is given"),
        ({OP: {"decode": []}}, ConfigError, "attention_backend.decode' is empty"),
        ({OP: {"decode": ["flagoss"]}}, ConfigError, "Unknown order token 'flagoss'"),
        ({OP: {"decode": ["flagos"]}, f"{OP}.decode": ["vendor"]}, ConfigError, "given twice"),
        ({"attention_backed.decode": ["flagos"]}, UnknownOperatorError, "attention_backend"),
    ],
)  # fmt: skip
def test_what_cannot_be(orders, error, message):
    with pytest.raises(error, match=message):
        SelectionPolicy.from_dict(per_op_order=orders)


def test_a_file_names_itself_in_the_error(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("op_backends: {rms_norm: {decode: flagos}}")
    with pytest.raises(ConfigError, match=r"mine.yaml.*op_backends: rms_norm cannot differ"):
        configuration.load(environ={"VLLM_FL_CONFIG": str(path)})


def test_each_phase_has_its_own_ranking(two):
    policy = SelectionPolicy.from_dict(per_op_order=APART)
    by_phase = two.rank_by_phase(OP, policy)
    assert {phase: [i.impl_id for i in r.order] for phase, r in by_phase.items()} == {
        "decode": ["default.flagos"],
        "prefill": ["vendor.acme", "default.flagos"],
    }
    ((impl, decision),) = by_phase["decode"].rejected
    assert impl.impl_id == "vendor.acme"
    assert decision.reason == "the order for attention_backend.decode is flagos"


@pytest.mark.parametrize(
    ("orders", "prefill"),
    [
        ({}, "default.flagos"),  # as any operator without an order
        ({OP: ["vendor"]}, "vendor.acme"),
    ],
)
def test_a_phase_without_an_order_has_the_operator_s(two, orders, prefill):
    orders = {**orders, f"{OP}.decode": ["flagos"]}
    policy = SelectionPolicy.from_dict(per_op_order=orders)
    by_phase = two.rank_by_phase(OP, policy)
    assert by_phase["decode"].order[0].impl_id == "default.flagos"
    assert by_phase["prefill"].order[0].impl_id == prefill


def test_phases_alike_have_one_ranking(two):
    policy = SelectionPolicy.from_dict(per_op_order={OP: ["vendor"]})
    assert list(two.rank_by_phase(OP, policy)) == [""]
    assert list(two.rank_by_phase("rms_norm", SelectionPolicy.from_dict(per_op_order=APART))) == [
        ""
    ]


def test_reports_show_both(two):
    set_global_policy(SelectionPolicy.from_dict(per_op_order=APART))
    assert {name: impl.impl_id for name, impl in two.first_choices().items()} == {
        f"{OP}.decode": "default.flagos",
        f"{OP}.prefill": "vendor.acme",
    }
    rows = {row["op"]: row["implementation"] for row in operator_table(two)}
    assert rows == {f"{OP}.decode": "default.flagos", f"{OP}.prefill": "vendor.acme"}
    report = explain(two, OP)
    assert {phase: d["chosen"] for phase, d in report["phases"].items()} == {
        "decode": "default.flagos",
        "prefill": "vendor.acme",
    }
    assert report["phases"]["prefill"]["order"] == ["vendor", "flagos"]
    set_global_policy(SelectionPolicy())
    assert explain(two, OP)["chosen"] == "default.flagos"


def test_the_table_says_what_is_in_use_and_not_what_was_passed_over(two):
    set_global_policy(SelectionPolicy.from_dict(per_op_order={OP: ["flagos", "vendor"]}))
    vendor = two.registry.get_implementation(OP, "vendor.acme")
    two.usage.note(vendor)
    assert [(r["op"], r["implementation"]) for r in operator_table(two)] == [(OP, "vendor.acme")]
    flagos = two.registry.get_implementation(OP, "default.flagos")
    two.usage.note(flagos, "decode")
    two.usage.note(vendor, "prefill")
    assert {r["op"]: r["implementation"] for r in operator_table(two)} == {
        f"{OP}.decode": "default.flagos", f"{OP}.prefill": "vendor.acme",
    }  # fmt: skip


def test_a_question_leaves_what_serves_as_it_is(two, tmp_path):
    two.usage.oplist = OpList(tmp_path / "ops.txt")
    flagos = two.registry.get_implementation(OP, "default.flagos")
    vendor = two.registry.get_implementation(OP, "vendor.acme")
    two.usage.note(flagos, "decode")
    two.usage.note(vendor, "prefill")
    before = (
        operator_table(two),
        (tmp_path / "ops.txt").read_text(),
        two.usage.impl_ids[f"{OP}.decode"],
    )
    assert two.get_selected_impl_id(OP) == "default.flagos"
    two.resolve(OP)
    two.resolve_candidates(OP)
    explain(two, OP)
    assert two.usage.serving(OP) == {"decode": flagos, "prefill": vendor}
    assert (
        operator_table(two), (tmp_path / "ops.txt").read_text(), two.usage.impl_ids[f"{OP}.decode"],
    ) == before  # fmt: skip
    assert OP not in two.usage.impl_ids


def test_the_command_line_explains_both(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_FL_PER_OP", f"{OP}.decode=impl:nobody.s;{OP}.prefill=reference")
    get_default_manager()
    set_global_policy(configuration.load().policy())
    assert main(["explain", OP]) == 1  # nothing runs it in one phase
    text = capsys.readouterr().out
    decode, prefill = text.split("In the phase prefill:")
    assert "In the phase decode:\nOrder: impl:nobody.s (from VLLM_FL_PER_OP)" in decode
    assert "Nothing runs attention_backend.decode under this policy." in decode
    assert "Order: reference (from VLLM_FL_PER_OP); falls back on errors." in prefill
    assert main(["explain", f"{OP}.prefill"]) == 0
    assert capsys.readouterr().out.endswith(f"In the phase prefill:{prefill}")
    assert main(["explain", f"{OP}.other"]) == 1
    assert "attention_backend has no phase 'other'" in capsys.readouterr().err
    assert main(["config"]) == 0
    assert f"{OP}.decode=impl:nobody.s; {OP}.prefill=reference" in capsys.readouterr().out


def test_the_schema_has_phases_for_attention_alone():
    schema = json_schema()["properties"]["op_backends"]
    assert list(schema["properties"]) == [OP]
    by_phase = schema["properties"][OP]["oneOf"][-1]
    assert list(by_phase["properties"]) == ["decode", "prefill"]
    assert by_phase["additionalProperties"] is False
    json.dumps(schema)


def test_names_and_orders_by_phase():
    assert split_name(f"{OP}.decode") == (OP, "decode")
    assert split_name("rms_norm") == ("rms_norm", "")
    flat = {"rms_norm": ["a"], f"{OP}.decode": ["b"], f"{OP}.prefill": ["c"]}
    nested = {"rms_norm": ["a"], OP: {"decode": ["b"], "prefill": ["c"]}}
    assert nested_orders(flat) == nested
    assert flat_orders(nested) == flat
    both = {OP: ["a"], f"{OP}.decode": ["b"]}
    assert nested_orders(both) == both
    assert lay_orders(flat, {OP: ["d"]}) == {"rms_norm": ["a"], OP: ["d"]}
    decode = {f"{OP}.decode": ["e"]}
    assert lay_orders({OP: ["d"]}, decode) == {OP: ["d"], **decode}
    assert lay_orders(flat, decode) == {**flat, **decode}


def test_choices_as_texts():
    pair = {"decode": "default.flagos", "prefill": "vendor.cuda"}
    assert join_choice(pair) == "decode:default.flagos+prefill:vendor.cuda"
    assert split_choice(OP, join_choice(pair)) == pair
    assert join_choice({"decode": "vendor.cuda", "prefill": "vendor.cuda"}) == "vendor.cuda"
    assert split_choice(OP, "vendor.cuda") == {"": "vendor.cuda"}
    assert split_choice("rms_norm", "vendor.cuda") == {"": "vendor.cuda"}
