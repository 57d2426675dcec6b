"""vLLM's compile-cache key changes with whatever changes which implementation runs."""

from __future__ import annotations

import pytest

from vllm_fl import register_layers
from vllm_fl.dispatch import (
    SelectionPolicy,
    get_default_manager,
    reset_default_manager,
    reset_global_policy,
    set_global_policy,
)
from vllm_fl.dispatch.env import VARIABLES
from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.integration.custom_ops import CUSTOM_OPS, LAYERS
from vllm_fl.integration.layers import layer_classes


@pytest.fixture(autouse=True)
def _clean():
    reset_default_manager()
    reset_global_policy()
    yield
    reset_global_policy()
    reset_default_manager()


def key() -> str:
    from vllm.config import VllmConfig

    return VllmConfig().compute_hash()


def acme(version: str) -> OpImpl:
    return OpImpl(
        "rms_norm", "vendor.acme", BackendImplKind.VENDOR, lambda *a: a, vendor="acme",
        distribution="acme", version=version,
    )  # fmt: skip


def test_the_same_choices_give_the_same_key():
    assert key() == key()


def test_another_policy():
    before = key()
    set_global_policy(SelectionPolicy.from_dict(per_op_order={"rms_norm": ["reference"]}))
    assert key() != before


def test_another_implementation_and_another_version_of_its_wheel():
    keys = {key()}
    for version in ("1.0", "1.1"):
        reset_default_manager()
        get_default_manager().registry.register_impl(acme(version))
        keys.add(key())
    assert len(keys) == 3


def test_other_layers(monkeypatch):
    before = key()
    monkeypatch.setenv("VLLM_FL_OOT_BLACKLIST", "rms_norm")
    assert key() != before


def test_vllm_knows_every_variable_and_hashes_none_by_its_text(monkeypatch):
    from vllm import envs
    from vllm.platforms import current_platform

    register_layers()
    before = envs.compile_factors()
    # Up to 0.28 a function of the module, in 0.33 a method of the platform.
    validate = getattr(envs, "validate_environ", None) or current_platform.validate_environ
    for variable in VARIABLES:
        monkeypatch.setenv(variable.name, "anything")
    validate(hard_fail=True)
    assert envs.compile_factors() == before
    monkeypatch.setenv("VLLM_FL_PREFERR", "vendor")
    with pytest.raises(ValueError, match="VLLM_FL_PREFERR"):
        validate(hard_fail=True)


def test_the_switch_of_every_dispatched_layer_is_known():
    """Those of mixtures of experts have none: they replace what vLLM calls inside one operator."""
    layers = layer_classes()
    assert set(layers) == set(LAYERS)
    for op_name in CUSTOM_OPS:
        assert {layer.name for layer in layers[op_name].values()} == {op_name}
