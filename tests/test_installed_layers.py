"""vLLM builds the layers that the configuration in force names, also when it is another one."""

from __future__ import annotations

import pytest

from vllm_fl import register_layers
from vllm_fl.dispatch import reset_default_manager, reset_global_policy
from vllm_fl.dispatch.errors import ConfigError


@pytest.fixture
def built(monkeypatch):
    """Return which class vLLM builds for a norm, and all classes of ours that it knows."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.layernorm import RMSNorm

    def under(**environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        reset_global_policy()
        register_layers()
        for name in environ:
            monkeypatch.delenv(name)
        with set_current_vllm_config(VllmConfig()):
            return type(RMSNorm(8)).__name__, set(op_registry_oot)

    yield under
    reset_default_manager()
    reset_global_policy()
    register_layers()


def test_layers_of_an_earlier_configuration_are_taken_back(built):
    norm, everything = built()
    assert norm == "RMSNormFL"
    assert {"MoERunner", "RMSNorm", "SiluAndMul"} <= everything
    assert built(VLLM_FL_OOT_BLACKLIST="rms_norm") == ("RMSNorm", everything - {"RMSNorm"})
    # A layer that calls several operators stays while one of them is dispatched.
    assert built(VLLM_FL_OOT_WHITELIST="grouped_topk") == ("RMSNorm", {"MoERunner"})
    assert built(VLLM_FL_OOT_ENABLED="0") == ("RMSNorm", set())
    assert built() == ("RMSNormFL", everything)


def test_what_others_have_registered_stays(built, monkeypatch):
    from vllm.model_executor.custom_op import op_registry_oot

    monkeypatch.setitem(op_registry_oot, "SomebodysLayer", type("SomebodysLayerOOT", (), {}))
    assert built(VLLM_FL_OOT_ENABLED="0") == ("RMSNorm", {"SomebodysLayer"})


def test_two_plugins_with_a_layer_in_the_same_place(built):
    from vllm.model_executor.custom_op import op_registry_oot

    built(VLLM_FL_OOT_ENABLED="0")
    other = op_registry_oot["RMSNorm"] = type("AcmeNorm", (), {"__module__": "acme.layers"})
    with pytest.raises(
        ConfigError, match=r"acme\.layers\.AcmeNorm, .*\.RMSNormFL\. Add rms_norm to VLLM_FL_OOT_"
    ):
        built()
    _, registered = built(VLLM_FL_OOT_BLACKLIST="rms_norm")
    assert {"SiluAndMul", "RMSNorm"} <= registered
    assert op_registry_oot.pop("RMSNorm") is other
