from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fl.dispatch import (
    ConfigError,
    Decision,
    NoImplementationError,
    SelectionPolicy,
    UnknownOperatorError,
    match_token,
)
from vllm_fl.dispatch.policy import rank

OP = "silu_and_mul"


def ids(ranking):
    return [impl.impl_id for impl in ranking.order]


def reasons(ranking):
    return {impl.impl_id: decision.reason for impl, decision in ranking.rejected}


@pytest.fixture
def four(impl):
    return [impl(i) for i in ("reference.torch", "vendor.b", "default.flagos", "vendor.a")]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ({}, ["default.flagos", "vendor.a", "vendor.b", "reference.torch"]),
        ({"prefer": "vendor"}, ["vendor.a", "vendor.b", "default.flagos", "reference.torch"]),
        ({"prefer": "reference"}, ["reference.torch", "default.flagos", "vendor.a", "vendor.b"]),
        ({"deny_vendors": ["a"]}, ["default.flagos", "vendor.b", "reference.torch"]),
        ({"allow_vendors": ["a"]}, ["default.flagos", "vendor.a", "reference.torch"]),
        ({"allow_vendors": []}, ["default.flagos", "reference.torch"]),
        ({"per_op_order": {OP: ["vendor:b", "reference"]}}, ["vendor.b", "reference.torch"]),
        ({"per_op_order": {OP: ["impl:vendor.b", "vendor"]}}, ["vendor.b", "vendor.a"]),
        ({"per_op_order": {"rms_norm": ["reference"]}, "prefer": "vendor"},
         ["vendor.a", "vendor.b", "default.flagos", "reference.torch"]),
    ],
)  # fmt: skip
def test_order(four, policy, order):
    for arrangement in itertools.permutations(four):
        assert ids(rank(OP, arrangement, SelectionPolicy.from_dict(**policy), {})) == order


def test_priority_orders_within_a_token_only(impl):
    impls = [impl("vendor.a", priority=1), impl("vendor.b", priority=999), impl("default.flagos")]
    assert ids(rank(OP, impls, SelectionPolicy(), {})) == ["default.flagos", "vendor.b", "vendor.a"]


def test_every_no_has_its_reason(impl):
    impls = [
        impl("default.flagos", available=lambda: "Triton has no compiler for the CPU"),
        impl("vendor.a"),
        impl("vendor.b"),
        impl("vendor.c"),
        impl("reference.torch"),
    ]
    policy = SelectionPolicy.from_dict(
        per_op_order={OP: ["flagos", "vendor"]}, deny_vendors=["a"], allow_vendors=["b"]
    )
    ranking = rank(OP, impls, policy, {"vendor.b": "RuntimeError: boom"})
    assert ranking.order == ()
    assert reasons(ranking) == {
        "default.flagos": "Triton has no compiler for the CPU",
        "vendor.a": "vendor a is denied",
        "vendor.b": "out since it failed: RuntimeError: boom",
        "vendor.c": "vendor c is not allowed (allowed: b)",
        "reference.torch": "the order for silu_and_mul is flagos > vendor",
    }
    with pytest.raises(NoImplementationError) as caught:
        ranking.require("Hint.")
    for reason in (*reasons(ranking).values(), "No implementation of 'silu_and_mul'", "Hint."):
        assert reason in str(caught.value)


def test_availability_is_not_asked_of_those_the_policy_refuses(impl):
    def explode():
        raise AssertionError("asked")

    refused = impl("vendor.a", available=explode)
    ranking = rank(OP, [refused], SelectionPolicy.from_dict(deny_vendors=["a"]), {})
    assert reasons(ranking) == {"vendor.a": "vendor a is denied"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prefer": "flagoss"}, ConfigError, "Did you mean 'flagos'"),
        ({"strict": "false"}, ConfigError, "strict='false' is not a boolean"),
        ({"per_op_order": {OP: ["vendr:acme"]}}, ConfigError, "Unknown order token 'vendr:acme'"),
        ({"per_op_order": {OP: ["vendor:"]}}, ConfigError, "Unknown order token 'vendor:'"),
        ({"per_op_order": {OP: []}}, ConfigError, "is empty"),
        (
            {"per_op_order": {OP: ["vendor", "vendor"]}},
            ConfigError,
            "has 'vendor' twice: vendor > ",
        ),
        ({"per_op_order": {"rmsnorm": ["vendor"]}}, UnknownOperatorError, "'rms_norm'"),
        (
            {"allow_vendors": ["a"], "deny_vendors": ["a"]},
            ConfigError,
            "both allowed and denied: a",
        ),
    ],
)
def test_what_a_policy_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        SelectionPolicy.from_dict(**arguments)


def test_tokens(impl):
    vendor, flagos = impl("vendor.acme"), impl("default.flagos")
    assert match_token(vendor, "vendor")
    assert match_token(vendor, "vendor:acme")
    assert match_token(vendor, "impl:vendor.acme")
    assert not match_token(vendor, "vendor:Acme")
    assert not match_token(vendor, "flagos")
    assert match_token(flagos, "flagos")
    assert not match_token(flagos, "vendor:default")


tokens = st.sampled_from(["flagos", "vendor", "reference", "vendor:a", "impl:vendor.b"])
policies = st.builds(
    SelectionPolicy.from_dict,
    prefer=st.sampled_from(["flagos", "vendor", "reference"]),
    strict=st.booleans(),
    per_op_order=st.dictionaries(
        st.just(OP), st.lists(tokens, min_size=1, max_size=4, unique=True), max_size=1
    ),
    deny_vendors=st.sets(st.sampled_from("ab")),
)


def test_which_vendors_are_allowed():
    denied = SelectionPolicy.from_dict(deny_vendors=["acme"])
    assert not denied.is_vendor_allowed("acme")
    assert denied.is_vendor_allowed("bolt")
    alone = SelectionPolicy.from_dict(allow_vendors=["acme"])
    assert alone.is_vendor_allowed("acme")
    assert not alone.is_vendor_allowed("bolt")


@given(policies, policies)
def test_equal_content_means_equal_hash_and_fingerprint(one, two):
    again = SelectionPolicy.from_dict(**one.to_dict())
    assert again == one
    assert hash(again) == hash(one)
    assert again.fingerprint() == one.fingerprint()
    assert (one == two) == (one.fingerprint() == two.fingerprint())


@given(policies, st.permutations(["reference.torch", "vendor.b", "default.flagos", "vendor.a"]))
def test_ranking_places_each_implementation_once_whatever_the_order(policy, order):
    from vllm_fl.dispatch import BackendImplKind, OpImpl

    kinds = {"default": "flagos"}
    impls = [
        OpImpl(OP, i, BackendImplKind(kinds.get(i.split(".")[0], i.split(".")[0])), print,
               vendor=i[-1] if i.startswith("vendor") else None)
        for i in order
    ]  # fmt: skip
    ranking = rank(OP, impls, policy, {}, lambda impl: Decision(True))
    sorted_ranking = rank(OP, sorted(impls, key=lambda i: i.impl_id), policy, {})
    assert ids(ranking) == ids(sorted_ranking)
    assert sorted(ids(ranking) + list(reasons(ranking))) == sorted(order)
    assert all(reasons(ranking).values())


@pytest.mark.parametrize(
    "arguments",
    [
        {"deny_vendors": "acme"},
        {"allow_vendors": ["a", ["b"]]},
        {"flagos_whitelist": "rms_norm"},
        {"per_op_order": {OP: "vendor"}},
    ],
)
def test_a_text_is_not_a_list_of_names(arguments):
    with pytest.raises(ConfigError, match=r"is not a list of names|, not a list\."):
        SelectionPolicy.from_dict(**arguments)


def test_lists_become_sets():
    policy = SelectionPolicy(deny_vendors=["a"], flagos_blacklist=["rms_norm"])
    assert policy == SelectionPolicy.from_dict(deny_vendors={"a"}, flagos_blacklist=("rms_norm",))
    assert hash(policy)


def test_a_policy_from_another_process_has_this_one_s_hash(wheels):
    make = """
import pickle, sys
from vllm_fl.dispatch import SelectionPolicy
policy = SelectionPolicy.from_dict("vendor", True, {"rms_norm": ["vendor"]}, ["a", "b"],
                                   flagos_blacklist=["silu_and_mul"])
"""
    sent = wheels.process(make + "print(pickle.dumps(policy).hex())", PYTHONHASHSEED="1").stdout
    take = f"there = pickle.loads(bytes.fromhex({sent.strip()!r}))\n"
    check = "print([there == policy, hash(there) == hash(policy), {policy: 1}.get(there)])"
    done = wheels.process(make + take + check, PYTHONHASHSEED="2")
    assert done.stdout == "[True, True, 1]\n", done.stderr
