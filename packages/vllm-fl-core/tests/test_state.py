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
    state,
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


def test_a_policy_that_a_reset_overtook_while_it_was_read_is_not_kept(monkeypatch):
    read = state.current_config

    def overtaken():
        settings = read()
        monkeypatch.setattr(state, "current_config", read)
        monkeypatch.setenv("VLLM_FL_PREFER", "reference")
        reset_global_policy()
        return settings

    reset_global_policy()
    monkeypatch.setattr(state, "current_config", overtaken)
    assert get_policy().prefer == "reference"
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


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"VLLM_FL_OOT_ENABLED": "0", "VLLM_FL_OOT_WHITELIST": "rms_norm"},
            "VLLM_FL_OOT_WHITELIST has no effect: VLLM_FL_OOT_ENABLED is off.",
        ),
        (
            {"VLLM_FL_OOT_ENABLED": "0", "VLLM_FL_OOT_BLACKLIST": "+rms_norm"},
            "VLLM_FL_OOT_BLACKLIST has no effect: VLLM_FL_OOT_ENABLED is off.",
        ),
        (
            {"USE_FLAGGEMS": "0", "VLLM_FL_FLAGOS_WHITELIST": "rms_norm"},
            "VLLM_FL_FLAGOS_WHITELIST has no effect: USE_FLAGGEMS is off.",
        ),
        (
            {"USE_FLAGGEMS": "0", "VLLM_FL_FLAGOS_BLACKLIST": "rms_norm"},
            "VLLM_FL_FLAGOS_BLACKLIST has no effect: USE_FLAGGEMS is off.",
        ),
        (
            {"USE_FLAGGEMS": "0", "VLLM_FL_PREFER": "flagos"},
            "VLLM_FL_PREFER=flagos cannot be had: USE_FLAGGEMS is off.",
        ),
        (
            {
                "USE_FLAGGEMS": "0",
                "VLLM_FL_PER_OP": "rms_norm=flagos;attention_backend.decode=flagos;moe_sum=flagos|"
                "vendor",
            },
            "VLLM_FL_PER_OP: flagos alone for rms_norm, attention_backend.decode cannot be had: "
            "USE_FLAGGEMS is off.",
        ),
        (
            {
                "VLLM_FL_PREFER_ENABLED": "0",
                "VLLM_FL_OOT_ENABLED": "0",
                "VLLM_FL_OOT_WHITELIST": "rms_norm",
            },
            "VLLM_FL_OOT_WHITELIST has no effect: VLLM_FL_PREFER_ENABLED is off.",
        ),
        (
            {"VLLM_FL_PREFER_ENABLED": "0", "VLLM_FL_PREFER": "flagos"},
            "VLLM_FL_PREFER=flagos cannot be had: VLLM_FL_PREFER_ENABLED is off.",
        ),
        (
            {
                "VLLM_FL_OOT_ENABLED": "0",
                "VLLM_FL_PER_OP": "rms_norm=vendor;attention_backend.decode=vendor;moe_sum=flagos",
            },
            "VLLM_FL_PER_OP: the order of rms_norm, moe_sum has no effect: VLLM_FL_OOT_ENABLED is "
            "off.",
        ),
        (
            {
                "VLLM_FL_PREFER_ENABLED": "0",
                "VLLM_FL_OOT_ENABLED": "0",
                "VLLM_FL_PER_OP": "rms_norm=flagos",
            },
            "VLLM_FL_PER_OP: the order of rms_norm has no effect: VLLM_FL_PREFER_ENABLED is off.",
        ),
        (
            {"VLLM_FL_PREFER_ENABLED": "0", "VLLM_FL_PER_OP": "attention_backend=flagos"},
            "VLLM_FL_PER_OP: flagos alone for attention_backend cannot be had: "
            "VLLM_FL_PREFER_ENABLED is off.",
        ),
        (
            {
                "VLLM_FL_OOT_ENABLED": "0",
                "VLLM_FL_FLAGOS_BLACKLIST": "+rms_norm,+attention_backend",
            },
            "VLLM_FL_FLAGOS_BLACKLIST: +rms_norm has no effect: VLLM_FL_OOT_ENABLED is off.",
        ),
        (
            {
                "VLLM_FL_OOT_BLACKLIST": "+rms_norm",
                "VLLM_FL_PER_OP": "rms_norm=vendor;moe_sum=vendor",
            },
            "VLLM_FL_PER_OP: the order of rms_norm has no effect: VLLM_FL_OOT_BLACKLIST leaves the "
            "layer to vLLM.",
        ),
    ],
)
def test_what_another_variable_rules_out_is_named(monkeypatch, log, variables, said):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    reset_global_policy()
    get_policy()
    assert [record.getMessage() for record in log] == [said]
    monkeypatch.setenv("VLLM_FL_STRICT", "1")
    reset_global_policy()
    with pytest.raises(ConfigError) as raised:
        get_policy()
    assert str(raised.value) == said


@pytest.mark.parametrize(
    "variables",
    [
        # Attention is dispatched, whatever is off, and so is what it calls.
        {"VLLM_FL_PREFER_ENABLED": "0", "VLLM_FL_PER_OP": "attention_backend=vendor"},
        {"VLLM_FL_OOT_ENABLED": "0", "VLLM_FL_PER_OP": "attention_backend.decode=flagos"},
        {"VLLM_FL_OOT_ENABLED": "0", "VLLM_FL_PER_OP": "reshape_and_cache_flash=reference"},
        {"VLLM_FL_OOT_ENABLED": "0", "VLLM_FL_FLAGOS_BLACKLIST": "attention_backend"},
        {"VLLM_FL_OOT_ENABLED": "0", "VLLM_FL_FLAGOS_WHITELIST": "rms_norm"},
        {"USE_FLAGGEMS": "0", "VLLM_FL_OOT_BLACKLIST": "rms_norm"},
        {"USE_FLAGGEMS": "1", "VLLM_FL_FLAGOS_BLACKLIST": "rms_norm"},
    ],
)
def test_what_has_an_effect_beside_a_switch_is_not_named(monkeypatch, log, variables):
    monkeypatch.setenv("VLLM_FL_STRICT", "1")
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    reset_global_policy()
    assert get_policy().strict
    assert log == []


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"VLLM_FL_OOT_ENABLED": "0", "VLLM_FL_PREFER": "flagos"},
            ["VLLM_FL_PREFER acts on attention alone: VLLM_FL_OOT_ENABLED is off."],
        ),
        (
            {"VLLM_FL_PREFER_ENABLED": "0", "VLLM_FL_PREFER": "reference"},
            ["VLLM_FL_PREFER acts on attention alone: VLLM_FL_PREFER_ENABLED is off."],
        ),
        (
            {"VLLM_FL_OOT_ENABLED": "0", "VLLM_FL_DENY_VENDORS": "acme"},
            ["VLLM_FL_DENY_VENDORS acts on attention alone: VLLM_FL_OOT_ENABLED is off."],
        ),
        (
            {"FLAGCX_PATH": "/opt/flagcx"},
            [
                "FLAGCX_PATH is not read: collectives are those of the platform (NCCL, HCCL or "
                "Gloo). Unset it; another library comes with a platform class whose "
                "get_device_communicator_cls names its communicator."
            ],
        ),
    ],
)
def test_what_acts_on_less_is_named_and_no_fault(monkeypatch, log, variables, said):
    for name, text in {"VLLM_FL_STRICT": "1", **variables}.items():
        monkeypatch.setenv(name, text)
    reset_global_policy()
    assert get_policy().strict
    assert [record.getMessage() for record in log] == said


@pytest.mark.parametrize("variable", ["VLLM_FL_CONFIG", "VLLM_FL_TUNED_FILE"])
def test_what_a_switch_takes_from_a_file_is_named(monkeypatch, tmp_path, log, variable):
    file = tmp_path / "fl.yaml"
    file.write_text("strict: true\nop_backends: {rms_norm: vendor, attention_backend: vendor}")
    monkeypatch.setenv(variable, str(file))
    monkeypatch.setenv("VLLM_FL_OOT_ENABLED", "0")
    reset_global_policy()
    assert get_policy().strict
    source = f"{file} (VLLM_FL_CONFIG)" if variable == "VLLM_FL_CONFIG" else f"{file} (tuned)"
    (record,) = log
    assert record.getMessage() == (
        f"op_backends in {source}: the order of rms_norm has no effect: VLLM_FL_OOT_ENABLED is off."
    )


def test_what_a_file_itself_rules_out_is_told_once(monkeypatch, tmp_path, log):
    file = tmp_path / "fl.yaml"
    file.write_text("oot_blacklist: [rms_norm]\nop_backends: {rms_norm: vendor}\nprefer: vendor")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(file))
    monkeypatch.setenv("USE_FLAGGEMS", "0")
    reset_global_policy()
    get_policy()
    (record,) = log
    assert "leaves the layer to vLLM" in record.getMessage()


def test_an_order_that_its_own_file_rules_out_is_named(monkeypatch, tmp_path, log):
    file = tmp_path / "fl.yaml"
    file.write_text("oot_blacklist: [rms_norm]\nop_backends: {rms_norm: vendor}")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(file))
    reset_global_policy()
    get_policy()
    (record,) = log
    assert record.getMessage() == (
        f"op_backends in {file} (VLLM_FL_CONFIG): the order of rms_norm has no effect: "
        f"oot_blacklist in {file} (VLLM_FL_CONFIG) leaves the layer to vLLM."
    )


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
