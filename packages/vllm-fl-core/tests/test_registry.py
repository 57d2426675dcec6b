from __future__ import annotations

import pytest

from vllm_fl.dispatch import OpRegistry, RegistrationError, UnknownOperatorError


def test_register_and_read(impl):
    registry = OpRegistry()
    first, second = impl("reference.torch"), impl("vendor.acme")
    registry.register_many([first, second])
    assert registry.list_operators() == ["silu_and_mul"]
    assert registry.get_implementations("silu_and_mul") == (first, second)
    assert registry.get_implementation("silu_and_mul", "vendor.acme") is second
    assert registry.get_implementation("silu_and_mul", "vendor.other") is None
    assert registry.get_implementations("rms_norm") == ()


def test_a_snapshot_does_not_change(impl):
    registry = OpRegistry()
    registry.register_impl(impl("reference.torch"))
    snapshot = registry.snapshot()
    registry.clear()
    assert len(snapshot.impls_by_op["silu_and_mul"]) == 1
    assert registry.snapshot().impls_by_op == {}
    assert registry.snapshot().version > snapshot.version
    with pytest.raises(TypeError):
        snapshot.impls_by_op["silu_and_mul"] = ()


def test_the_same_again_is_nothing_new_and_another_is_a_conflict(impl):
    registry = OpRegistry()
    one = impl("vendor.acme", print, distribution="acme-fl", version="1.0")
    registry.register_impl(one)
    registry.register_impl(one)
    assert registry.get_implementations("silu_and_mul") == (one,)
    with pytest.raises(RegistrationError, match=r"already registered by acme-fl 1\.0"):
        registry.register_impl(impl("vendor.acme", repr, distribution="other", version="2"))


def test_register_many_is_all_or_nothing(impl):
    registry = OpRegistry()
    bad = impl("vendor.acme", lambda y: y)
    with pytest.raises(RegistrationError, match="is 'y', not 'x'"):
        registry.register_many([impl("reference.torch"), bad])
    assert registry.list_operators() == []


def test_unknown_operators_are_refused(impl):
    with pytest.raises(UnknownOperatorError, match="rms_norm"):
        OpRegistry().register_impl(impl("reference.torch", op_name="rmsnorm"))


def test_unregister(impl):
    registry = OpRegistry()
    registry.register_many([impl("reference.torch"), impl("vendor.acme")])
    registry.unregister("silu_and_mul", "vendor.acme")
    assert [i.impl_id for i in registry.get_implementations("silu_and_mul")] == ["reference.torch"]
    registry.unregister("silu_and_mul", "reference.torch")
    assert registry.list_operators() == []
