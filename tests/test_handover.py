"""The policy goes from the process that configures vLLM to its workers, or the worker stops."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from vllm_fl.dispatch import (
    ConfigError,
    SelectionPolicy,
    get_policy,
    reset_default_manager,
    reset_global_policy,
    set_global_policy,
    with_preference,
)
from vllm_fl.integration import handover


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setattr(handover, "_adopted", None)
    monkeypatch.setattr(handover, "_published", set())
    reset_default_manager()
    reset_global_policy()
    yield
    reset_global_policy()
    reset_default_manager()


def configuration(additional, architectures=("AcmeForCausalLM",)):
    """Return what the hand-over reads of vLLM's configuration."""
    model = SimpleNamespace(architectures=list(architectures))
    return SimpleNamespace(additional_config=additional, model_config=model)


@pytest.fixture
def in_child(monkeypatch):
    """Go on as a child of this process, with the policy that it reads for itself."""

    def become():
        own = os.getpid()
        monkeypatch.setattr(handover.os, "getpid", lambda: own + 1)
        reset_global_policy()

    return become


@pytest.fixture
def published(monkeypatch):
    """What a parent with VLLM_FL_PREFER=vendor publishes."""
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    reset_global_policy()
    config = configuration({})
    handover.publish(config)
    return config


def test_a_child_with_the_same_environment_goes_on(published, in_child):
    in_child()
    handover.adopt(published)
    assert get_policy().prefer == "vendor"


@pytest.mark.parametrize("value", [None, "reference"])
def test_a_child_with_another_environment_stops(published, in_child, monkeypatch, value):
    in_child()
    monkeypatch.delenv("VLLM_FL_PREFER")
    if value is not None:
        monkeypatch.setenv("VLLM_FL_PREFER", value)
    with pytest.raises(ConfigError, match=f"prefer is '{value or 'flagos'}', was 'vendor'"):
        handover.adopt(published)


def test_a_policy_set_from_python_is_taken_over(in_child):
    set_global_policy(SelectionPolicy.from_dict(deny_vendors=["acme"]))
    config = configuration({"of": "another plug-in"})
    handover.publish(config)
    in_child()
    handover.adopt(config)
    assert get_policy().deny_vendors == {"acme"}
    assert config.additional_config["of"] == "another plug-in"


def test_operators_and_wheel_versions_are_published_for_the_compile_cache_key(published):
    operators = published.additional_config["vllm_fl"]["operators"]
    assert operators["rms_norm"].startswith("reference.torch vllm-fl-reference 0.")


def test_the_model_stays_known_where_a_part_of_it_is_built(tiny_model):
    from vllm.engine.arg_utils import EngineArgs

    whole = EngineArgs(model=str(tiny_model), dtype="float32").create_engine_config()
    part = whole.with_hf_config(whole.model_config.hf_config, architectures=["MistralForCausalLM"])
    assert part.model_config.architectures == ["MistralForCausalLM"]
    for config in (whole, part):
        assert handover.architectures(config) == whole.model_config.architectures
    assert handover.architectures(configuration({})) == []


def test_a_configuration_of_another_type_is_refused():
    with pytest.raises(ConfigError, match="additional_config is object"):
        handover.publish(configuration(object()))


def test_a_worker_that_nobody_configured_goes_on():
    handover.adopt(configuration({}))
    assert get_policy() == SelectionPolicy()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_FL_PLUGIN_MODULES", "plug"),
        ("VLLM_FL_OOT_BLACKLIST", "silu_and_mul"),
        ("VLLM_FL_COMPARE", "rms_norm=reference"),
        ("VLLM_FL_PLATFORM", "reference"),
    ],
)
def test_any_variable_that_chooses_must_arrive(in_child, monkeypatch, tmp_path, name, value):
    (tmp_path / "plug.py").write_text("def register_builtins(registry): pass")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(name, value)
    config = configuration({})
    handover.publish(config)
    in_child()
    monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="says something else to vllm-fl"):
        handover.adopt(config)


def test_what_does_not_choose_is_not_in_the_compile_cache_key(published, monkeypatch):
    monkeypatch.setenv("VLLM_FL_LOG_LEVEL", "debug")
    again = configuration({})
    handover.publish(again)
    assert again.additional_config == published.additional_config


def test_a_context_around_the_engine_is_published(in_child):
    config = configuration({})
    with with_preference("reference"):
        handover.publish(config)
        handover.adopt(config)
        assert get_policy().prefer == "reference"
    handover.adopt(config)
    assert get_policy().prefer == "flagos"  # the engine's policy is not the process's
    in_child()
    handover.adopt(config)
    assert get_policy().prefer == "reference"


def test_a_forked_child_takes_the_context_over():
    config = configuration({})
    with with_preference("reference"):
        handover.publish(config)
    child = os.fork()
    if child == 0:
        try:
            handover.adopt(config)
        finally:
            os._exit(get_policy().prefer != "reference")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert get_policy().prefer == "flagos"


def test_the_key_is_reserved():
    with pytest.raises(ConfigError, match="is reserved for vllm-fl"):
        handover.publish(configuration({"vllm_fl": {"a": 1}}))


def test_only_the_tuner_s_engine_has_live_attention(published):
    assert not handover.wants_live_attention(published)
    config = configuration({"vllm_fl": {"live_attention": True}})
    handover.publish(config)
    assert handover.wants_live_attention(config)
    ours, theirs = (c.additional_config["vllm_fl"] for c in (config, published))
    assert ours.keys() - theirs.keys() == {"live_attention"}
