"""Two engines of one process: each has the layers that its own policy and settings choose."""

from __future__ import annotations

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.selector import get_attn_backend

from vllm_fl import register_layers
from vllm_fl.dispatch import (
    SelectionPolicy,
    get_default_manager,
    reset_default_manager,
    reset_global_policy,
    set_global_policy,
    with_preference,
)
from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.integration.handover import KEY
from vllm_fl.integration.worker import WorkerExtensionFL
from vllm_fl_reference.attention.backend import ReferenceAttentionBackend

OPERATORS = ("attention_backend", "rotary_embedding", "silu_and_mul")
REFERENCE = dict.fromkeys(OPERATORS, "reference.torch")
ACME = dict.fromkeys(OPERATORS, "vendor.acme")


def acme_attention(use_mla=False, use_sparse=False):
    return f"{__name__}:AcmeAttention"


def acme_layer(*args):
    raise AssertionError("nothing is computed")


class AcmeAttention(ReferenceAttentionBackend):
    """The attention of acme."""


class Worker:
    """In the place of vLLM's: loads a model of an attention backend and two layers."""

    rank = 0

    def load_model(self):
        with set_current_vllm_config(self.vllm_config):
            self.backend = get_attn_backend(64, torch.float32, "auto")
            rope = {"rope_type": "default", "rope_theta": 1e4}
            self.layers = [get_rope(64, 128, rope_parameters=rope), get_act_and_mul_fn("silu")]

    def serving(self):
        """Return operator -> what implements it."""
        names = {"AcmeAttention": "vendor.acme", "ReferenceAttentionBackend": "reference.torch"}
        return {
            "attention_backend": names[self.backend.__name__],
            **{layer._op.op_name: layer._op.impl.impl_id for layer in self.layers},
        }

    def key(self):
        """Return what the compile-cache key says of it."""
        said = self.vllm_config.additional_config[KEY]["operators"]
        return {name: said[name].split()[0] for name in OPERATORS}


class ExtendedWorker(Worker, WorkerExtensionFL):
    """As vLLM makes it."""


@pytest.fixture
def build():
    """Return the worker of an engine of the policy in force."""

    def engine():
        worker = ExtendedWorker()
        worker.vllm_config = VllmConfig()
        worker.load_model()
        return worker

    reset_default_manager()
    reset_global_policy()
    register_layers()
    for op_name in OPERATORS:
        fn = acme_attention if op_name == "attention_backend" else acme_layer
        get_default_manager().registry.register_impl(
            OpImpl(op_name, "vendor.acme", BackendImplKind.VENDOR, fn, vendor="acme")
        )
    yield engine
    reset_default_manager()
    reset_global_policy()


def test_a_policy_of_a_context_ends_with_it(build):
    set_global_policy(SelectionPolicy(prefer="vendor"))
    with with_preference("reference"):
        first = build()
        assert first.serving() == first.key() == REFERENCE
    second = build()
    assert second.serving() == second.key() == ACME
    assert first.serving() == REFERENCE  # which lives on


def test_settings_of_the_second_engine(build, monkeypatch):
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    reset_global_policy()
    first = build()
    assert first.serving() == first.key() == ACME
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    reset_global_policy()
    second = build()
    assert second.serving() == second.key() == REFERENCE
