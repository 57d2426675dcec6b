from __future__ import annotations

import functools
import gc
import os
import re
import sys
import threading
import types
import weakref

import pytest

from vllm_fl.dispatch import (
    BackendLoadError,
    NoImplementationError,
    OpManager,
    RegistrationError,
    SelectionPolicy,
    bind_op,
    call_op,
    get_default_manager,
    reset_default_manager,
    resolve_op,
    set_global_policy,
    shared_op,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from vllm_fl.dispatch.errors import PredicateError
from vllm_fl.dispatch.quarantine import Quarantine

OP = "silu_and_mul"


@pytest.fixture
def three(manager, impl):
    manager.registry.register_many(
        [impl(i) for i in ("default.flagos", "vendor.acme", "reference.torch")]
    )
    return manager


@pytest.fixture
def broken(manager, impl):
    """A first choice that raises, and two that answer."""
    calls = []

    def fail(x):
        calls.append(x)
        raise ArithmeticError("boom")

    manager.registry.register_many(
        [impl("default.flagos", fail), impl("vendor.acme"), impl("reference.torch")]
    )
    manager.failing_calls = calls
    return manager


def test_call_resolve_and_bind_agree(three):
    assert three.call(OP, 1) == ("default.flagos", 1)
    assert three.resolve(OP)(1) == ("default.flagos", 1)
    assert three.bind(OP)(1) == ("default.flagos", 1)
    assert three.bind(OP).fn(x=1) == ("default.flagos", 1)
    assert three.get_selected_impl_id(OP) == "default.flagos"
    assert [i.impl_id for i in three.resolve_candidates(OP)] == [
        "default.flagos", "vendor.acme", "reference.torch",
    ]  # fmt: skip


def test_contexts_choose_for_calls_and_for_what_is_bound_inside(three):
    outside = three.bind(OP)
    with with_preference("reference"):
        inside = three.bind(OP)
        assert three.call(OP, 1)[0] == "reference.torch"
        assert outside(1)[0] == "default.flagos"
    assert three.call(OP, 1)[0] == "default.flagos"
    assert inside(1)[0] == "reference.torch"
    set_global_policy(SelectionPolicy(prefer="vendor"))
    assert outside(1)[0] == "vendor.acme"
    assert inside(1)[0] == "reference.torch"


def test_live_handles_follow_policy_and_registry(three, impl):
    handle = three.bind(OP)
    epoch = three.policy_epoch
    set_global_policy(SelectionPolicy(prefer="vendor"))
    assert three.policy_epoch > epoch
    assert (handle.impl.impl_id, handle(1)[0]) == ("vendor.acme",) * 2
    three.registry.register_impl(impl("vendor.aaa"))
    assert handle.fn(1)[0] == "vendor.aaa"
    three.registry.unregister(OP, "vendor.aaa")
    assert handle.fn(1)[0] == "vendor.acme"


def test_a_handle_left_without_implementation_says_why_and_recovers(three):
    handle = three.bind(OP)
    none = SelectionPolicy.from_dict(per_op_order={OP: ["impl:other"]})
    set_global_policy(none)
    with pytest.raises(NoImplementationError, match="the order for silu_and_mul is impl:other"):
        handle(1)
    set_global_policy(SelectionPolicy())
    assert handle(1)[0] == "default.flagos"


def test_handles_and_managers_are_not_kept_alive(three):
    handle = three.bind(OP)
    reference = weakref.ref(handle)
    del handle
    gc.collect()
    assert reference() is None
    manager = OpManager(register_builtins=False)
    reference = weakref.ref(manager)
    del manager
    gc.collect()
    assert reference() is None


def test_a_failure_falls_back_once_and_is_remembered(broken, log):
    handle = broken.bind(OP)
    for x in range(3):
        assert handle(x) == ("vendor.acme", x)
        assert broken.call(OP, x) == ("vendor.acme", x)
    assert broken.failing_calls == [0]
    assert broken.get_failed_impls() == {OP: {"default.flagos": "ArithmeticError: boom"}}
    assert broken.counters.fallbacks == {(OP, "default.flagos"): 1}
    (warning,) = (record for record in log if record.levelname == "WARNING")
    said = warning.getMessage()
    assert said.startswith("default.flagos of silu_and_mul is out until the policy changes: ")
    for part in ("vendor.acme takes over", "ArithmeticError: boom", "called with (0)"):
        assert part in said


def test_the_quarantine_ends_with_the_policy_s_change(broken):
    assert broken.call(OP, 0)[0] == "vendor.acme"
    set_global_policy(SelectionPolicy.from_dict(deny_vendors=["acme"]))
    assert broken.get_failed_impls() == {}
    assert broken.call(OP, 1)[0] == "reference.torch"
    assert broken.failing_calls == [0, 1]


def test_the_quarantine_can_be_lifted_by_hand(broken):
    broken.call(OP, 0)
    broken.clear_failed_impls("rms_norm")
    assert broken.get_failed_impls(OP)
    broken.clear_failed_impls(OP)
    assert broken.get_failed_impls() == {}
    assert broken.resolve_candidates(OP)[0].impl_id == "default.flagos"


def test_strict_raises_the_first_error_with_what_was_called(broken):
    handle = broken.bind(OP)
    with with_strict_mode():
        bound_strict = broken.bind(OP)
        for call in (lambda: broken.call(OP, 7), lambda: bound_strict(7)):
            with pytest.raises(ArithmeticError, match="boom") as caught:
                call()
            if hasattr(caught.value, "__notes__"):
                note = (
                    "in operator 'silu_and_mul', implementation 'default.flagos', called with (7)"
                )
                assert note in caught.value.__notes__[0]
    assert broken.get_failed_impls() == {}
    assert handle(1)[0] == "vendor.acme"


def test_when_all_fail_the_call_is_at_fault(manager, impl):
    def fail(x):
        raise ValueError(f"bad {x}")

    def fail_too(x):
        raise KeyError(x)

    manager.registry.register_many([impl("default.flagos", fail), impl("vendor.a", fail_too)])
    with pytest.raises(ValueError, match="bad 3"):
        manager.call(OP, 3)
    assert manager.get_failed_impls() == {}


def test_a_follower_that_cannot_be_loaded_gives_way(broken, impl):
    broken.registry.unregister(OP, "vendor.acme")
    broken.registry.register_impl(impl("vendor.acme", "nomod.x:f"))
    assert broken.call(OP, 1) == ("reference.torch", 1)
    failed = broken.get_failed_impls()[OP]
    assert failed["default.flagos"] == "ArithmeticError: boom"
    assert "Cannot import 'nomod.x'" in failed["vendor.acme"]


def test_a_call_that_fails_asks_no_predicate_that_cannot_be_loaded(broken, impl):
    broken.registry.unregister(OP, "vendor.acme")
    broken.registry.register_impl(impl("vendor.acme", supports="nomod.x:f"))
    assert broken.call(OP, 1) == ("reference.torch", 1)
    assert list(broken.get_failed_impls()[OP]) == ["default.flagos"]
    (refused,) = (
        decision.reason
        for one, decision in broken.rank(OP, call=((1,), {})).rejected
        if one.impl_id == "vendor.acme"
    )
    assert refused.startswith("Cannot import 'nomod.x'")
    with with_strict_mode(), pytest.raises(BackendLoadError, match=r"nomod\.x"):
        broken.rank(OP, call=((1,), {}))


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize("error", [MemoryError, OutOfMemoryError, KeyboardInterrupt, SystemExit])
def test_out_of_memory_and_interrupts_pass_through(manager, impl, error):
    def fail(x):
        raise error

    manager.registry.register_many([impl("default.flagos", fail), impl("vendor.acme")])
    for call in (manager.bind(OP), lambda x: manager.call(OP, x)):
        with pytest.raises(error):
            call(1)
    assert manager.get_failed_impls() == {}


def test_a_call_that_does_not_fit_the_operator_blames_nobody(three):
    with pytest.raises(TypeError):
        three.call(OP, 1, 2)
    with pytest.raises(TypeError):
        three.bind(OP)()
    assert three.get_failed_impls() == {}


def test_nothing_is_retried_on_donated_arguments(manager, impl):
    def norm(x, residual, weight, epsilon):
        if residual is not None:
            residual.append("half done")
        raise ArithmeticError("boom")

    manager.registry.register_many(
        [
            impl("default.flagos", norm, op_name="rms_norm"),
            impl("reference.torch", lambda x, residual, weight, epsilon: "fine",
                 op_name="rms_norm"),
        ]
    )  # fmt: skip
    residual = []
    with pytest.raises(ArithmeticError, match="boom") as caught:
        manager.call("rms_norm", 1, residual, 1, 1e-6)
    assert residual == ["half done"]
    if hasattr(caught.value, "__notes__"):
        assert "donated arguments may have been overwritten" in caught.value.__notes__[0]
    assert manager.call("rms_norm", 1, None, 1, 1e-6) == "fine"


def test_an_implementation_that_is_out_of_place_is_retried(manager, impl):
    def norm(x, residual, weight, epsilon):
        raise ArithmeticError("boom")

    manager.registry.register_many(
        [
            impl("default.flagos", norm, op_name="rms_norm", in_place=False),
            impl("reference.torch", lambda *args: "fine", op_name="rms_norm"),
        ]
    )
    assert manager.call("rms_norm", 1, [2], 1, 1e-6) == "fine"


def test_unavailable_implementations_are_asked_once_an_epoch(manager, impl):
    asked = []

    def probe():
        asked.append(1)
        return "no device"

    manager.registry.register_many(
        [impl("default.flagos", available=probe), impl("vendor.acme"),
         impl("default.flagos", lambda *a: 0, op_name="rms_norm", available=probe)]
    )  # fmt: skip
    assert manager.call(OP, 1)[0] == "vendor.acme"
    with pytest.raises(NoImplementationError, match="no device"):
        manager.resolve("rms_norm")
    assert len(asked) == 1
    manager.bump_policy_epoch()
    manager.call(OP, 1)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        ("json:dumps", r"vendor\.acme \(by hand\) does not fit operator 'silu_and_mul'"),
        ("no_such_module:f", "Cannot import 'no_such_module'"),
        ("json:no_such_name", "'json' has no 'no_such_name'"),
    ],
)
def test_a_function_that_cannot_be_loaded_gives_way_or_raises_under_strict(
    manager, impl, log, fn, reason
):
    manager.registry.register_many([impl("vendor.acme", fn), impl("reference.torch")])
    with with_strict_mode(), pytest.raises((RegistrationError, BackendLoadError), match=reason):
        manager.call(OP, 1)
    assert manager.call(OP, 1) == ("reference.torch", 1)
    assert manager.bind(OP)(2) == ("reference.torch", 2)
    (warning,) = (record for record in log if record.levelname == "WARNING")
    assert re.search(reason, warning.getMessage())
    manager.registry.unregister(OP, "reference.torch")
    with pytest.raises(NoImplementationError, match=reason):
        manager.call(OP, 1)


def test_counting_is_off_until_asked_for(three):
    handle = three.bind(OP)
    handle(1)
    assert not three.counters.calls
    assert handle.fn is three.resolve(OP)
    three.count_calls()
    handle(1)
    three.call(OP, 1)
    with with_denied_vendors("acme"), with_preference("vendor"):
        three.call(OP, 1)
    assert three.counters.calls == {(OP, "default.flagos"): 3}
    three.count_calls(False)
    handle(1)
    assert sum(three.counters.calls.values()) == 3


def test_the_lines_users_know(impl, capsys):
    from vllm_fl.dispatch import BackendImplKind, BackendPriority, OpImpl

    registry = get_default_manager().registry
    registry.register_many(
        [OpImpl(op_name="silu_and_mul", impl_id="vendor.acme", kind=BackendImplKind.VENDOR,
                fn=lambda x: ("acme", x), vendor="acme", priority=BackendPriority.VENDOR)]
    )  # fmt: skip
    with with_preference("vendor"):
        assert call_op("silu_and_mul", 3) == ("acme", 3)
        fn = resolve_op("silu_and_mul")
        assert fn(3) == ("acme", 3)
        assert bind_op("silu_and_mul")(3) == ("acme", 3)
    m = get_default_manager()
    m.ensure_initialized()
    for op, impls in m.registry.snapshot().impls_by_op.items():
        print(op, [(i.impl_id, i.is_available()) for i in impls])
    assert "('vendor.acme', True)" in capsys.readouterr().out


def test_two_managers_do_not_share_choices(three, impl):
    other = OpManager(register_builtins=False)
    other.registry.register_impl(impl("vendor.other"))
    assert other.call(OP, 1)[0] == "vendor.other"
    assert three.call(OP, 1)[0] == "default.flagos"
    set_global_policy(SelectionPolicy(prefer="vendor"))
    assert three.call(OP, 1)[0] == "vendor.acme"


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_while_another_thread_holds_the_locks(three):
    held, done = threading.Event(), threading.Event()

    def hold():
        with three._lock, three.registry._lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    child = os.fork()
    if child == 0:
        fine = three.call(OP, 1)[0] == "default.flagos"
        three.registry.unregister(OP, "default.flagos")
        os._exit(0 if fine and three.call(OP, 1)[0] == "vendor.acme" else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def picky(manager, impl):
    """A first choice that takes even numbers, a second that takes what 3 divides, and a last."""
    manager.registry.register_many(
        [
            impl("default.flagos", supports=lambda x: x % 2 == 0 or f"{x} is odd"),
            impl("vendor.acme", supports=lambda x: x % 3 == 0),
            impl("reference.torch"),
        ]
    )
    return manager


@pytest.mark.parametrize(
    ("x", "who"),
    [(2, "default.flagos"), (6, "default.flagos"), (9, "vendor.acme"), (5, "reference.torch")],
)
def test_predicates_decide_before_the_call(picky, x, who):
    assert picky.call(OP, x) == picky.bind(OP)(x) == picky.resolve(OP)(x) == (who, x)
    ranking = picky.rank(OP, call=((x,), {}))
    assert ranking.order[0].impl_id == who
    assert picky.get_failed_impls() == {}


def test_a_declined_call_has_its_reasons(picky):
    ranking = picky.rank(OP, call=((5,), {}))
    reasons = {impl.impl_id: decision.reason for impl, decision in ranking.rejected}
    assert reasons == {
        "default.flagos": "5 is odd",
        "vendor.acme": "its predicate refuses these arguments",
    }
    picky.registry.unregister(OP, "reference.torch")
    with pytest.raises(NoImplementationError, match=r"flagos: 5 is odd\n(.*\n)*Called with"):
        picky.call(OP, 5)


def test_declines_are_counted_while_counting_is_on(picky):
    picky.call(OP, 5)
    assert not picky.counters.declines
    picky.count_calls()
    picky.call(OP, 9)
    picky.bind(OP)(5)
    assert picky.counters.declines == {(OP, "default.flagos"): 2, (OP, "vendor.acme"): 1}
    assert picky.counters.calls == {(OP, "vendor.acme"): 1, (OP, "reference.torch"): 1}


def test_a_failure_behind_a_predicate_blames_the_one_that_ran(manager, impl):
    def fail(x):
        raise ArithmeticError("boom")

    manager.registry.register_many(
        [
            impl("default.flagos", supports=lambda x: x > 10),
            impl("vendor.acme", fail, supports=lambda x: x > 0),
            impl("reference.torch"),
        ]
    )
    assert manager.call(OP, 5) == ("reference.torch", 5)
    assert manager.get_failed_impls(OP) == {OP: {"vendor.acme": "ArithmeticError: boom"}}
    assert manager.call(OP, 11) == ("default.flagos", 11)


def test_sixteen_failures_at_once_all_fall_back(manager, impl):
    barrier = threading.Barrier(16)

    def fail(x):
        barrier.wait(20)
        raise ArithmeticError("boom")

    manager.registry.register_many([impl("default.flagos", fail), impl("reference.torch")])
    handle = manager.bind(OP)
    results = []
    threads = [threading.Thread(target=lambda: results.append(handle(1))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [("reference.torch", 1)] * 16
    assert handle.impl.impl_id == "reference.torch"


def test_a_minimum_architecture(manager, impl, monkeypatch):
    from vllm_fl.dispatch import state

    manager.registry.register_many([impl("vendor.acme", min_arch=90), impl("reference.torch")])
    monkeypatch.setattr(state, "device_arch", lambda: 80)
    reason = manager.rank(OP).rejected[0][1].reason
    assert reason == "it needs architecture 90, this device has 80"
    monkeypatch.setattr(state, "device_arch", lambda: 90)
    manager.bump_policy_epoch()
    assert manager.call(OP, 1)[0] == "vendor.acme"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dtypes_are_those_of_the_first_argument(manager, impl):
    torch = pytest.importorskip("torch")
    manager.registry.register_many(
        [impl("vendor.acme", dtypes=("float16", "bfloat16")), impl("reference.torch")]
    )
    assert manager.call(OP, torch.zeros(2, dtype=torch.bfloat16))[0] == "vendor.acme"
    assert manager.call(OP, torch.zeros(2))[0] == "reference.torch"
    reason = manager.rank(OP, call=((torch.zeros(2),), {})).rejected[0][1].reason
    assert reason == "dtype float32 is not among float16, bfloat16"


def test_dtypes_must_be_torch_s_names(impl):
    with pytest.raises(RegistrationError, match=r"unknown dtypes \['bf16'\]"):
        impl("vendor.acme", dtypes=("bf16",))


def test_a_keyword_call_passes_the_dtype_check(manager, impl):
    torch = pytest.importorskip("torch")
    manager.registry.register_impl(impl("vendor.acme", dtypes=("float32",)))
    assert manager.call(OP, x=torch.zeros(2))[0] == "vendor.acme"


@pytest.mark.parametrize(
    "supports", [lambda x: x.no_such_attribute, lambda y: True, "no_such_module:supports"]
)
def test_a_broken_predicate_costs_its_own_implementation_alone(manager, impl, supports):
    manager.registry.register_many(
        [impl("vendor.acme", supports=supports), impl("reference.torch")]
    )
    assert manager.call(OP, 1) == ("reference.torch", 1)
    assert manager.bind(OP)(2) == ("reference.torch", 2)


@pytest.mark.parametrize("through", ["call", "bind"])
def test_a_predicate_that_raises_is_told_and_not_asked_again(manager, impl, log, through):
    asked = []

    def supports(x):
        asked.append(x)
        raise AttributeError("typo")

    manager.registry.register_many(
        [impl("vendor.acme", supports=supports), impl("reference.torch")]
    )
    call = manager.bind(OP) if through == "bind" else functools.partial(manager.call, OP)
    assert [call(1), call(2)] == [("reference.torch", 1), ("reference.torch", 2)]
    assert 2 not in asked
    why = "PredicateError: its predicate raised AttributeError: typo"
    assert manager.get_failed_impls() == {OP: {"vendor.acme": why}}
    assert manager.get_selected_impl_id(OP) == "reference.torch"
    (told,) = [record.getMessage() for record in log]
    assert f"vendor.acme of {OP} is out until the policy changes: {why}" in told
    with with_strict_mode(), pytest.raises(PredicateError, match="AttributeError: typo"):
        manager.call(OP, 3)


def test_a_predicate_that_raises_has_overwritten_nothing(manager, impl):
    def supports(x, residual, weight, epsilon):
        raise AttributeError("typo")

    def norm(x, residual, weight, epsilon):
        return "fine"

    manager.registry.register_many(
        [
            impl("vendor.acme", norm, op_name="rms_norm", in_place=True, supports=supports),
            impl("reference.torch", norm, op_name="rms_norm"),
        ]
    )
    assert manager.call("rms_norm", 1, 2, 3, 1e-6) == "fine"
    assert list(manager.get_failed_impls("rms_norm")["rms_norm"]) == ["vendor.acme"]


def test_a_first_choice_that_declines_is_told_once_and_the_taker_is_noted(manager, impl, log):
    def supports(x):
        return True if x < 0 else f"{x} is not negative"

    manager.registry.register_many(
        [impl("vendor.acme", supports=supports), impl("reference.torch")]
    )
    handle = manager.bind(OP)
    assert handle(-1) == ("vendor.acme", -1)
    assert manager.usage.impl_ids == {OP: {"vendor.acme"}}
    assert [handle(1), handle(2)] == [("reference.torch", 1), ("reference.torch", 2)]
    assert manager.usage.impl_ids == {OP: {"vendor.acme", "reference.torch"}}
    told = [record.getMessage() for record in log]
    line = "vendor.acme does not take some calls, reference.torch does: 1 is not negative"
    assert told == [f"{OP}: {line}"]


def test_availability_is_asked_of_each_operator_s_own_probe(manager, impl):
    def absent(x):
        return x

    def present(x, residual, weight, epsilon):
        return "fine"

    absent._is_available, present._is_available = (lambda: False), (lambda: True)
    manager.registry.register_many(
        [impl("vendor.z", absent), impl("vendor.z", present, op_name="rms_norm")]
    )
    with pytest.raises(NoImplementationError):
        manager.resolve(OP)
    assert manager.call("rms_norm", 1, None, 1, 1e-6) == "fine"


@pytest.mark.parametrize("text", ["NPU out of memory. Tried to allocate", "can't allocate memory"])
def test_out_of_memory_is_known_by_its_text(manager, impl, text):
    def fail(x):
        raise RuntimeError(text)

    manager.registry.register_many([impl("default.flagos", fail), impl("vendor.acme")])
    with pytest.raises(RuntimeError, match="memory"):
        manager.call(OP, 1)
    assert manager.get_failed_impls() == {}


def test_a_policy_change_reaches_every_handle_whatever_one_of_them_meets(manager, impl):
    manager.registry.register_many([impl("default.flagos"), impl("vendor.acme", "nomod.x:f")])
    handles = [manager.bind(OP) for _ in range(3)]
    set_global_policy(SelectionPolicy(prefer="vendor", strict=True))
    for handle in handles:
        with pytest.raises(BackendLoadError, match=r"nomod\.x"):
            handle(1)
    set_global_policy(SelectionPolicy())
    assert [handle(1)[0] for handle in handles] == ["default.flagos"] * 3


def test_a_lazy_module_whose_import_fails_gives_way(manager, impl, monkeypatch):
    lazy = types.ModuleType("lazy")

    def load_when_asked(name):
        raise ImportError("libacme.so is missing")

    lazy.__getattr__ = load_when_asked
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    manager.registry.register_many([impl("vendor.acme", "lazy:f"), impl("reference.torch")])
    assert manager.bind(OP)(1) == ("reference.torch", 1)
    assert "libacme.so is missing" in manager.get_failed_impls(OP)[OP]["vendor.acme"]


def test_a_policy_change_reaches_every_handle_whatever_a_backend_raises(manager, impl):
    manager.registry.register_many([impl("default.flagos"), impl("vendor.acme")])
    handles = [manager.bind(OP) for _ in range(3)]

    def refuse(impl, fn):
        if impl.impl_id == "vendor.acme":
            raise OSError("the device is gone")
        return fn

    manager.observe(refuse)
    set_global_policy(SelectionPolicy(prefer="vendor"))
    for handle in handles:
        assert handle.impl is None
        with pytest.raises(OSError, match="the device is gone"):
            handle(1)
    set_global_policy(SelectionPolicy())
    assert [handle(1)[0] for handle in handles] == ["default.flagos"] * 3


def test_strict_does_not_hide_behind_the_quarantine(broken):
    assert broken.call(OP, 0)[0] == "vendor.acme"
    with with_strict_mode(), pytest.raises(ArithmeticError, match="boom"):
        broken.call(OP, 1)


def test_a_repaired_implementation_gets_another_chance(broken, impl):
    broken.call(OP, 0)
    broken.registry.unregister(OP, "default.flagos")
    broken.registry.register_impl(impl("default.flagos"))
    assert broken.call(OP, 1)[0] == "default.flagos"
    assert broken.get_failed_impls() == {}


def test_letting_out_what_is_out_already_changes_nothing():
    quarantine = Quarantine()
    quarantine.put(OP, "vendor.acme", "boom")
    quarantine.clear()  # as a change of the policy does, while the registry tells of its own
    quarantine.release(OP, "vendor.acme")
    assert quarantine.copy() == {}


def test_another_implementation_of_the_same_id_is_asked_itself(manager, impl):
    def absent(x):
        return "absent"

    def present(x):
        return "present"

    absent._is_available, present._is_available = lambda: False, lambda: True
    manager.registry.register_many([impl("vendor.acme", absent), impl("reference.torch")])
    handle = manager.bind(OP)
    assert handle(1) == ("reference.torch", 1)
    manager.registry.unregister(OP, "vendor.acme")
    manager.registry.register_impl(impl("vendor.acme", present))
    assert handle(1) == manager.call(OP, 1) == "present"


def test_an_answer_that_a_change_overtook_is_not_kept(manager, impl):
    answers = ["no device yet", True]

    def probe():
        answer = answers.pop(0)
        if answers:
            manager.bump_policy_epoch()
        return answer

    manager.registry.register_many([impl("vendor.acme", available=probe), impl("reference.torch")])
    assert manager.call(OP, 1) == ("vendor.acme", 1)


def test_a_misspelt_vendor_is_told_once_when_the_policy_is_used(three, log):
    set_global_policy(SelectionPolicy.from_dict(deny_vendors=["acne"], prefer="vendor"))
    assert three.bind(OP)(1)[0] == three.call(OP, 1)[0] == "vendor.acme"
    three.bump_policy_epoch()
    (warning,) = (record for record in log if record.levelname == "WARNING")
    assert warning.getMessage().startswith(
        "deny_vendors: no backend here is of the vendor 'acne'. Did you mean 'acme'?"
    )
    set_global_policy(SelectionPolicy.from_dict(deny_vendors=["acme"], prefer="vendor"))
    assert three.call(OP, 1)[0] == "default.flagos"
    assert [record for record in log if record.levelname == "WARNING"] == [warning]


@pytest.mark.parametrize("guard", [None, lambda x: True])
def test_a_call_outlives_any_number_of_policy_changes(manager, impl, guard):
    def fail(x):
        for _ in range(3):
            manager.bump_policy_epoch()
        gc.collect()
        raise ArithmeticError("boom")

    manager.registry.register_many(
        [impl("default.flagos", fail, supports=guard), impl("reference.torch")]
    )
    handle = manager.bind(OP)
    manager.count_calls()  # what is called then is made anew with each change
    assert handle(1) == ("reference.torch", 1)
    assert manager.get_failed_impls() == {OP: {"default.flagos": "ArithmeticError: boom"}}
    manager.clear_failed_impls()
    assert manager.call(OP, 1) == ("reference.torch", 1)
    with with_strict_mode(), pytest.raises(ArithmeticError) as caught:
        manager.call(OP, 1)
    if hasattr(caught.value, "__notes__"):
        assert "implementation 'default.flagos', called with (1)" in caught.value.__notes__[0]


def test_a_function_that_cannot_be_held_weakly_falls_back(manager, impl):
    class Kernel:
        __slots__ = ()

        def __call__(self, x):
            manager.bump_policy_epoch()
            manager.bump_policy_epoch()
            raise ArithmeticError("boom")

    manager.registry.register_many([impl("default.flagos", Kernel()), impl("reference.torch")])
    assert manager.bind(OP)(1) == ("reference.torch", 1)


def test_policy_changes_leave_nothing_behind(manager, impl):
    manager.registry.register_many(
        [impl("vendor.acme", supports=lambda x: True), impl("reference.torch", "json:loads")]
    )
    manager.count_calls()
    handle = manager.bind(OP)
    for _ in range(50):
        manager.bump_policy_epoch()
        handle(1)
    gc.collect()
    assert len(manager._callables._owners) < 10


def test_a_handle_is_copied_and_pickled_as_another_live_handle(manager, impl):
    import copy
    import pickle

    manager.registry.register_many([impl("vendor.acme"), impl("reference.torch")])
    handle = manager.bind(OP)
    with with_preference("reference"):
        scoped = manager.bind(OP)
    copies = [copy.copy(handle), copy.deepcopy({"layer": handle})["layer"]]
    set_global_policy(SelectionPolicy.from_dict(deny_vendors=["acme"]))
    assert [h(1)[0] for h in copies] == ["reference.torch"] * 2
    set_global_policy(SelectionPolicy())
    assert copy.copy(scoped)(1)[0] == "reference.torch"
    get_default_manager().registry.register_impl(impl("vendor.zzz"))
    assert pickle.loads(pickle.dumps(handle))(1)[0] in ("vendor.zzz", "default.flagos")
    assert pickle.loads(pickle.dumps(scoped)).scoped == scoped.scoped


def test_the_shared_handle_is_one_and_follows_the_process_wide_policy(impl):
    def register():
        registry = get_default_manager().registry
        registry.register_many([impl("vendor.zzz"), impl("reference.zzz")])

    register()
    set_global_policy(SelectionPolicy.from_dict(per_op_order={OP: ["vendor:zzz"]}))
    with with_preference("reference"):
        handle = shared_op(OP)
        assert handle(1)[0] == "vendor.zzz"
    assert shared_op(OP) is handle
    set_global_policy(SelectionPolicy.from_dict(per_op_order={OP: ["impl:reference.zzz"]}))
    assert shared_op(OP)(1)[0] == "reference.zzz"
    reset_default_manager()
    register()
    assert shared_op(OP) is not handle
