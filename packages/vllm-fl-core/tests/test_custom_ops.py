"""Which vLLM layers are dispatched where the platform's defaults, or the user, say so."""

from __future__ import annotations

import pytest

from vllm_fl.dispatch import config as configuration
from vllm_fl.dispatch.ops import CATALOGUE
from vllm_fl.dispatch.state import set_global_policy
from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.dispatch.unused import BESIDE_LAYERS
from vllm_fl.integration import custom_ops

DEFAULTS = """
prefer: vendor
op_backends: {fused_experts: [flagos, vendor], topk_softmax: [flagos, vendor]}
oot_blacklist: [rms_norm]
"""


def _fn(*args, **kwargs):
    """Stand in for an implementation."""


@pytest.fixture
def decide(manager, tmp_path, monkeypatch):
    """Return which layers are dispatched under these defaults and an environment."""
    package = tmp_path / "acme_fl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "acme.yaml").write_text(DEFAULTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(custom_ops, "get_default_manager", lambda: manager)
    for op_name in ("fused_experts", "topk_softmax"):
        manager.registry.register_impl(
            OpImpl(op_name, "vendor.acme", BackendImplKind.VENDOR, _fn, vendor="acme")
        )

    def run(flagos, **environ):
        for op_name in flagos:
            manager.registry.register_impl(
                OpImpl(op_name, "default.flagos", BackendImplKind.DEFAULT, _fn)
            )
        settings = configuration.load("acme_fl:acme.yaml", environ)
        set_global_policy(settings.policy())
        monkeypatch.setattr(custom_ops, "current_config", lambda: settings)
        return {op: custom_ops.decision(op) for op in custom_ops.LAYERS}

    return run


def test_a_layer_is_taken_from_vllm_for_the_first_of_the_defaults_only(decide):
    found = decide(["fused_experts"])
    assert found["fused_experts"]
    assert not found["rms_norm"]
    assert found["silu_and_mul"]  # the defaults say nothing about it
    assert not found["topk_softmax"]
    assert found["topk_softmax"].reason.startswith("flagos, first in ")
    assert found["topk_softmax"].reason.endswith(
        "acme.yaml (platform defaults), does not run (it is not installed)"
    )


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        (
            {"VLLM_FL_FLAGOS_BLACKLIST": "fused_experts"},
            "default.flagos: fused_experts is in flagos_blacklist",
        ),
        ({"USE_FLAGGEMS": "0"}, "default.flagos: the default backend is off"),
    ],
)
def test_the_reason_is_why_the_first_of_the_defaults_does_not_run(decide, environ, reason):
    found = decide(["fused_experts"], **environ)
    assert found["fused_experts"].reason.endswith(f"(platform defaults), does not run ({reason})")


@pytest.mark.parametrize(
    ("environ", "replaced", "asked"),
    [
        # A preference is for every layer, and asks for none in particular.
        ({"VLLM_FL_PREFER": "reference"}, set(custom_ops.LAYERS), set()),
        (
            {"VLLM_FL_PREFER": "reference", "VLLM_FL_OOT_BLACKLIST": "+silu_and_mul"},
            set(custom_ops.LAYERS) - {"silu_and_mul"},
            set(),
        ),
        (
            {"VLLM_FL_PREFER": "flagos", "VLLM_FL_OOT_WHITELIST": "rms_norm"},
            {"rms_norm"},
            {"rms_norm"},
        ),
        ({"VLLM_FL_PREFER": "flagos", "VLLM_FL_OOT_ENABLED": "0"}, set(), set()),
        ({"VLLM_FL_PREFER": "flagos", "VLLM_FL_PREFER_ENABLED": "0"}, set(), set()),
        # A named order takes its own operator off the defaults' list.
        (
            {"VLLM_FL_PER_OP": "rms_norm=reference"},
            set(custom_ops.LAYERS) - {"fused_experts", "topk_softmax"},
            {"rms_norm"},
        ),
        (
            {"VLLM_FL_PER_OP": "rms_norm=reference", "VLLM_FL_OOT_BLACKLIST": "rms_norm"},
            set(custom_ops.LAYERS) - {"rms_norm", "fused_experts", "topk_softmax"},
            {"rms_norm"},
        ),
    ],
)
def test_what_the_environment_says_goes_before_the_defaults(decide, environ, replaced, asked):
    found = decide([], **environ)
    assert {op for op in found if found[op]} == replaced
    assert {op for op in custom_ops.LAYERS if custom_ops.is_asked_for(op)} == asked


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, set()),
        ({"VLLM_FL_OOT_WHITELIST": "topk_softmax"}, {"topk_softmax"}),
        ({"VLLM_FL_OOT_BLACKLIST": "silu_and_mul"}, {"rms_norm"}),
        ({"VLLM_FL_OOT_BLACKLIST": "+silu_and_mul"}, set()),
        ({"VLLM_FL_PER_OP": "fused_experts=vendor;moe_sum=vendor"}, {"fused_experts"}),
    ],
)
def test_what_the_user_asks_for_is_dispatched_by_whoever_can(decide, environ, asked):
    found = decide([], **environ)
    assert {op for op in custom_ops.LAYERS if custom_ops.is_asked_for(op)} == asked
    assert all(found[op] for op in asked)
    assert {"topk_softmax", "fused_experts"} & {op for op in found if found[op]} <= asked


def test_which_operators_run_without_any_dispatched_layer():
    """What experts call runs inside of a layer; everything else is a layer's, or attention's."""
    of_experts = {"moe_align_block_size", "moe_sum"}
    assert CATALOGUE.keys() - BESIDE_LAYERS == {*custom_ops.LAYERS, *of_experts}
