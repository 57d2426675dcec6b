from __future__ import annotations

import asyncio
import threading

import pytest

from vllm_fl.dispatch import (
    ConfigError,
    SelectionPolicy,
    env,
    get_policy,
    get_policy_epoch,
    policy_context,
    policy_from_config,
    reset_global_policy,
    set_global_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)

VENDOR = SelectionPolicy(prefer="vendor")


def test_set_returns_the_policy_before_and_advances_the_epoch():
    epoch = get_policy_epoch()
    assert set_global_policy(VENDOR) == SelectionPolicy()
    assert get_policy() == VENDOR
    assert get_policy_epoch() > epoch


def test_reset_reads_the_environment_again(monkeypatch):
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    assert get_policy().prefer == "flagos"
    reset_global_policy()
    assert get_policy().prefer == "reference"


def test_contexts_nest_and_end():
    with with_preference("vendor"):
        with with_strict_mode(), with_denied_vendors("a"), with_denied_vendors("b"):
            assert get_policy() == SelectionPolicy.from_dict(
                "vendor", True, deny_vendors=["a", "b"]
            )
            with with_allowed_vendors("c"):
                assert get_policy().allow_vendors == {"c"}
        assert get_policy() == VENDOR
    assert get_policy() == SelectionPolicy()


def test_a_context_ends_when_its_block_raises():
    with pytest.raises(KeyError), policy_context(VENDOR):
        raise KeyError
    assert get_policy() == SelectionPolicy()


def test_a_context_does_not_advance_the_epoch():
    epoch = get_policy_epoch()
    with policy_context(VENDOR):
        pass
    assert get_policy_epoch() == epoch


def test_a_context_is_its_thread_s_alone():
    seen = []
    with policy_context(VENDOR):
        thread = threading.Thread(target=lambda: seen.append(get_policy()))
        thread.start()
        thread.join()
    assert seen == [SelectionPolicy()]


def test_a_context_is_its_task_s_alone():
    async def inside(prefer, gate):
        with with_preference(prefer):
            await gate.wait()
            return get_policy().prefer

    async def run():
        gate = asyncio.Event()
        tasks = [asyncio.create_task(inside(p, gate)) for p in ("vendor", "reference")]
        await asyncio.sleep(0)
        gate.set()
        return await asyncio.gather(*tasks), get_policy().prefer

    assert asyncio.run(run()) == (["vendor", "reference"], "flagos")


def test_policy_from_config(tmp_path):
    file = tmp_path / "fl.yaml"
    file.write_text("prefer: vendor\nop_backends: {rms_norm: [reference]}\n")
    policy = policy_from_config(file)
    assert policy == SelectionPolicy.from_dict("vendor", per_op_order={"rms_norm": ["reference"]})
    with pytest.raises(ConfigError, match="no such file"):
        policy_from_config(tmp_path / "missing.yaml")


def test_variables_without_effect_are_named(monkeypatch, tmp_path, log):
    file = tmp_path / "fl.yaml"
    file.write_text("prefer: vendor")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(file))
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    monkeypatch.setenv("VLLM_FL_PREFERR", "reference")
    reset_global_policy()
    assert get_policy().prefer == "vendor"
    assert [record.getMessage() for record in log] == [
        "VLLM_FL_PREFER has no effect: VLLM_FL_CONFIG replaces it.",
        "Unknown environment variable VLLM_FL_PREFERR has no effect. Did you mean "
        f"'VLLM_FL_PREFER'? Allowed: {', '.join(sorted(v.name for v in env.VARIABLES))}.",
    ]


def test_a_limit_of_nothing_is_named(monkeypatch, log):
    monkeypatch.setenv("VLLM_FL_COMPARE_LIMIT", "0.1")
    reset_global_policy()
    get_policy()
    (record,) = log
    assert record.getMessage() == (
        "VLLM_FL_COMPARE_LIMIT has no effect: VLLM_FL_COMPARE is not set."
    )
    monkeypatch.setenv("VLLM_FL_COMPARE", "rms_norm=reference")
    reset_global_policy()
    get_policy()
    assert log == [record]


def test_under_strict_an_unknown_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("VLLM_FL_STRICT", "1")
    monkeypatch.setenv("VLLM_FL_PREFERR", "reference")
    reset_global_policy()
    with pytest.raises(ConfigError, match="Unknown environment variable VLLM_FL_PREFERR"):
        get_policy()
