from __future__ import annotations

import sys
import types

import pytest

from vllm_fl.dispatch import (
    BackendImplKind,
    BackendLoadError,
    BackendPriority,
    Decision,
    OpImpl,
    RegistrationError,
)
from vllm_fl.dispatch.types import YES, load_object


def test_kinds_and_priorities_are_those_users_know():
    assert [k.value for k in BackendImplKind] == ["flagos", "vendor", "reference"]
    assert [p.value for p in BackendPriority] == [150, 100, 50]
    for kind in BackendImplKind:
        assert (
            OpImpl("silu_and_mul", "a", kind, print, vendor="a").priority
            == (BackendPriority[kind.name])
        )


def test_a_vendor_implementation_needs_a_vendor():
    with pytest.raises(RegistrationError, match="needs vendor='<name>', got None"):
        OpImpl("silu_and_mul", "vendor.x", BackendImplKind.VENDOR, print)


def test_fn_must_be_callable_or_text():
    with pytest.raises(RegistrationError, match="must be callable or"):
        OpImpl("silu_and_mul", "reference.torch", BackendImplKind.REFERENCE, 3)


@pytest.mark.parametrize("dtypes", [["float16", "bfloat16"], ("float16", "bfloat16")])
def test_dtypes_may_be_a_list(impl, dtypes):
    one = impl("vendor.acme", dtypes=dtypes)
    assert one.dtypes == ("float16", "bfloat16")
    assert {one: 1}[impl("vendor.acme", one.fn, dtypes=["float16", "bfloat16"])] == 1


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ("float16", r"dtypes='float16' is not a tuple of names. Write \('float16',\)."),
        (["float17", "float16", 16], r"unknown dtypes \['float17', 16\]. Allowed: bfloat16, "),
    ],
)
def test_dtypes_that_do_not_exist(impl, dtypes, message):
    with pytest.raises(RegistrationError, match=f"vendor.acme: {message}"):
        impl("vendor.acme", dtypes=dtypes)


def test_an_implementation_whose_function_has_no_hash_may_be_bound(manager, impl):
    class Kernel:
        __hash__ = None

        def __call__(self, x):
            return "ran", x

    manager.registry.register_impl(impl("vendor.acme", Kernel()))
    assert manager.bind("silu_and_mul")(1) == ("ran", 1)
    handle = manager.bind("silu_and_mul")
    assert {one.impl_id for one in manager.bound()} == {handle.impl.impl_id} == {"vendor.acme"}


@pytest.mark.parametrize(
    ("answer", "decision"),
    [
        (True, YES),
        (False, Decision(False, "because")),
        ("no driver", Decision(False, "no driver")),
        ("", YES),
        (Decision.no("arch"), Decision(False, "arch")),
    ],
)
def test_what_a_predicate_may_answer(answer, decision):
    assert Decision.of(answer, "because") == decision


def test_availability_is_asked_through_the_function_s_attribute(impl):
    def fn(x):
        return x

    fn._is_available = lambda: "no driver"
    one = impl("vendor.acme", fn)
    assert not one.is_available()
    assert one.availability().reason == "no driver"


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_an_availability_check_that_raises_is_a_no(impl, error):
    def broken():
        raise error("libacme.so")

    decision = impl("vendor.acme", available=broken).availability()
    assert decision == Decision.no(f"its availability check raised {error.__name__}: libacme.so")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("json.dumps", "not of the form"),
        ("no_such_module:f", "Cannot import 'no_such_module'"),
        ("json:no_such_name", "'json' has no 'no_such_name'"),
    ],
)
def test_loading_says_what_is_wrong(reference, message):
    with pytest.raises(BackendLoadError, match=message):
        load_object(reference)


@pytest.mark.parametrize("error", [ImportError, OSError, SystemExit, AttributeError])
def test_a_lazy_module_whose_import_fails(monkeypatch, error):
    lazy = types.ModuleType("lazy")

    def load_when_asked(name):
        raise error("libacme.so is missing")

    lazy.__getattr__ = load_when_asked
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    with pytest.raises(BackendLoadError, match=rf"'lazy' has no 'f' .*{error.__name__}: libacme"):
        load_object("lazy:f")


@pytest.mark.parametrize(
    ("note", "described"),
    [
        ("", ""),
        ("a kernel: fast", "a kernel: fast"),
        ("builtins:repr", "'silu_and_mul'"),
        (
            "no_such_module:f",
            "its note cannot be had: BackendLoadError: Cannot import 'no_such_module' (for "
            "'no_such_module:f'): ModuleNotFoundError: No module named 'no_such_module'",
        ),
    ],
)
def test_a_note_is_a_text_or_a_function_of_the_operator(impl, note, described):
    assert impl("vendor.acme", note=note).described() == described


def test_loading_finds_nested_names():
    assert load_object("json:JSONDecoder.decode").__qualname__ == "JSONDecoder.decode"
