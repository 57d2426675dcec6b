"""vLLM's compile-cache key changes with whatever changes which implementation runs."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

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
from vllm_fl.integration import handover
from vllm_fl.integration.custom_ops import CUSTOM_OPS, LAYERS
from vllm_fl.integration.layers import bind, layer_classes


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


def key_of_a_layer() -> tuple[str, str]:
    """Return the key when the layer has been built, and what it calls."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        op = bind("rms_norm")
    return config.compute_hash(), op.impl.impl_id


@pytest.mark.parametrize("declines", [False, True])
def test_an_implementation_that_cannot_be_imported(tmp_path, monkeypatch, declines):
    """What was compiled for the fall-back is not what a later, repaired engine runs."""
    monkeypatch.syspath_prepend(tmp_path)
    keys, chosen = set(), []
    for name in ("broken_acme", "repaired_acme", "broken_again"):
        reset_default_manager()
        registry = get_default_manager().registry
        if declines:  # the broken one is what answers the calls
            choosy = replace(acme("1.0"), impl_id="vendor.aaa", supports=lambda *a: False)
            registry.register_impl(choosy)
        # The table says the same: only the module is there or not.
        module = tmp_path / "acme_kernels.py"
        module.unlink(missing_ok=True)
        sys.modules.pop("acme_kernels", None)
        importlib.invalidate_caches()
        if name == "repaired_acme":
            module.write_text("def norm(x, residual, weight, epsilon): return x")
        registry.register_impl(replace(acme("1.0"), fn="acme_kernels:norm"))
        order = {"rms_norm": ["vendor", "reference"]}
        set_global_policy(SelectionPolicy.from_dict(per_op_order=order))
        published = handover.operator_versions()["rms_norm"]
        key, impl_id = key_of_a_layer()
        keys.add(key)
        chosen.append((published.split()[0], impl_id))
    if declines:
        assert chosen == [("vendor.aaa", "vendor.aaa")] * 3
    else:
        bound = ("reference.torch", "vendor.acme", "reference.torch")
        assert chosen == [("vendor.acme", impl_id) for impl_id in bound]
    assert len(keys) == 2


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
