"""Which vLLM layers are dispatched where the platform's defaults, or the user, say so."""

from __future__ import annotations

import pytest

from vllm_fl.dispatch import config as configuration
from vllm_fl.dispatch.types import BackendImplKind, OpImpl
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
    assert found["topk_softmax"].reason.endswith("acme.yaml (platform defaults), is absent")


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
