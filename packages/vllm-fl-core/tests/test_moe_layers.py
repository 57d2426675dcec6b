"""The classes that stand in for vLLM's mixture-of-experts classes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("vllm_fl_reference")

from packaging.version import Version  # noqa: E402
from vllm.config import LoRAConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.lora.utils import is_in_target_modules  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import (  # noqa: E402
    FusedTopKBiasRouter,
)
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import (  # noqa: E402
    FusedTopKRouter,
)
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import (  # noqa: E402
    GroupedTopKRouter,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # noqa: E402
    UnquantizedFusedMoEMethod,
)

from vllm_fl.dispatch import env, state  # noqa: E402
from vllm_fl.dispatch.default import get_default_manager  # noqa: E402
from vllm_fl.integration import layers, moe  # noqa: E402
from vllm_fl.integration.adapters import ADAPTERS, adapter  # noqa: E402
from vllm_fl.integration.versions import adapter_module  # noqa: E402


@pytest.fixture(autouse=True)
def vllm_config():
    with set_current_vllm_config(VllmConfig()):
        yield


def layer_config(**changes):
    return FusedMoEConfig(
        **{
            "num_experts": 4,
            "experts_per_token": 2,
            "hidden_dim": 16,
            "intermediate_size": 8,
            "num_local_experts": 4,
            "num_logical_experts": 4,
            "activation": MoEActivation.SILU,
            "device": "cpu",
            "routing_method": RoutingMethodType.Renormalize,
            "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
            "in_dtype": torch.float32,
            **changes,
        }
    )


# -- experts


def test_the_method_answers_what_the_runner_asks():
    method = moe.UnquantizedFusedMoEMethodFL(layer_config())
    assert isinstance(method, UnquantizedFusedMoEMethod)
    assert method.is_monolithic is False
    assert method.supports_internal_mk is False
    assert method.topk_indices_dtype is None
    assert method.mk_can_overlap_shared_experts is False


def test_vllm_s_own_method_still_cannot_run_on_this_platform():
    """If this fails, vLLM has its own way on out-of-tree platforms: look at it."""
    method = object.__new__(UnquantizedFusedMoEMethod)
    UnquantizedFusedMoEMethod.__init__(method, layer_config())
    with pytest.raises(AttributeError, match="is_monolithic"):
        _ = method.is_monolithic


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_bias": True}, "need biases"),
        ({"activation": MoEActivation.SWIGLUOAI}, "need the activation 'swigluoai'"),
        ({"activation": MoEActivation.GELU_TANH}, "need the activation 'gelu_tanh'"),
        ({"swiglu_limit": 7.0}, "need a limit on the activation"),
        ({"moe_backend": "triton"}, "need the kernel of --moe-backend triton"),
    ],
)
def test_what_the_operator_does_not_have_is_refused_with_the_reason(change, reason):
    with pytest.raises(ValueError, match=reason):
        moe.UnquantizedFusedMoEMethodFL(layer_config(**change))


ON_EXPERTS = (
    None,
    ["experts"],
    ["q_proj", "text_experts"],
    ["model.layers.0.mlp.experts"],
    ["experts.0.gate_proj"],
)
ELSEWHERE = ([], ["q_proj", "gate_proj"], ["model.layers.0.mlp.shared_experts.down_proj"])


@pytest.mark.parametrize("targets", ON_EXPERTS + ELSEWHERE, ids=str)
def test_adapters_on_experts_are_refused_and_others_are_not(targets, monkeypatch):
    adapters = SimpleNamespace(lora_config=LoRAConfig(target_modules=targets))
    monkeypatch.setattr(moe, "get_current_vllm_config", lambda: adapters)
    if targets in ON_EXPERTS:
        with pytest.raises(ValueError, match="need LoRA adapters"):
            moe.UnquantizedFusedMoEMethodFL(layer_config())
    else:
        assert moe._missing(layer_config()) == ""


@pytest.mark.parametrize("targets", ON_EXPERTS[1:] + ELSEWHERE, ids=str)
def test_vllm_puts_adapters_on_the_same_experts(targets):
    packed = {"experts": ["experts.0.gate_proj", "experts.0.down_proj"]}
    names = ("model.layers.0.mlp.experts", "model.layers.0.mlp.text_experts")
    wrapped = any(is_in_target_modules(name, targets, packed) for name in names)
    assert wrapped == (targets in ON_EXPERTS)


def test_where_vllm_has_kernels_it_keeps_what_only_the_defaults_would_dispatch(monkeypatch):
    monkeypatch.setattr(moe, "current_platform", SimpleNamespace(is_out_of_tree=lambda: False))
    monkeypatch.setattr(moe.custom_ops, "is_asked_for", lambda op_name: False)
    own = moe.UnquantizedFusedMoEMethodFL(layer_config(has_bias=True))
    assert type(own) is adapter().UnquantizedMethod
    assert own.moe.has_bias
    assert type(moe.UnquantizedFusedMoEMethodFL(layer_config())) is moe.UnquantizedFusedMoEMethodFL
    monkeypatch.setattr(moe.custom_ops, "is_asked_for", lambda op_name: True)
    with pytest.raises(ValueError, match="need biases"):
        moe.UnquantizedFusedMoEMethodFL(layer_config(has_bias=True))


# -- routers


def test_a_softmax_router_calls_topk_softmax():
    router = moe.dispatched(FusedTopKRouter(top_k=3, global_num_experts=8, renormalize=False))
    assert isinstance(router, moe.FusedTopKRouterFL)
    get_default_manager().count_calls()
    logits = torch.randn(5, 8)
    weights, ids = router.select_experts(torch.empty(5, 16), logits)
    best = logits.softmax(-1).topk(3)
    torch.testing.assert_close(weights, best.values)
    assert ids.dtype == torch.int32
    assert ids.tolist() == best.indices.tolist()
    assert router.select_experts(torch.empty(5, 16), logits, torch.int64)[1].dtype == torch.int64


def test_padding_rows_get_no_experts(monkeypatch):
    mask = torch.tensor([False, True])
    monkeypatch.setattr(adapter(), "padding_mask", lambda tokens: mask[:tokens])
    router = moe.dispatched(FusedTopKRouter(top_k=2, global_num_experts=4))
    weights, ids = router.select_experts(torch.empty(2, 16), torch.randn(2, 4))
    assert (ids[0] >= 0).all()
    assert ids[1].tolist() == [-1, -1]
    assert weights[1].tolist() == [0, 0]


def test_another_scoring_function_is_vllm_s(monkeypatch):
    router = moe.dispatched(FusedTopKRouter(2, 4, scoring_func="sigmoid"))
    monkeypatch.setattr(FusedTopKRouter, "_compute_routing", lambda self, *a, **k: ("vLLM", a, k))
    assert router._compute_routing(1, 2, None, input_ids=3) == (
        "vLLM",
        (1, 2, None),
        {"input_ids": 3},
    )


def test_a_router_of_a_subclass_stays():
    class Special(FusedTopKRouter):
        pass

    router = Special(top_k=3, global_num_experts=8)
    assert moe.dispatched(router) is router


def test_a_router_that_the_configuration_leaves_to_vllm_stays(monkeypatch):
    monkeypatch.setenv(env.OOT_BLACKLIST.name, "topk_softmax")
    state.reset_global_policy()
    router = FusedTopKRouter(top_k=3, global_num_experts=8)
    assert moe.dispatched(router) is router


GROUPED = list(
    itertools.product(("softmax", "sigmoid"), (False, True), (False, True), (1.0, 2.5), (1, 4))
)


@pytest.mark.parametrize(("scoring", "biased", "renormalize", "scale", "groups"), GROUPED)
def test_a_grouped_router_chooses_as_vllm_s(scoring, biased, renormalize, scale, groups):
    torch.manual_seed(1)
    theirs = GroupedTopKRouter(
        top_k=3,
        global_num_experts=16,
        num_expert_group=groups,
        topk_group=min(2, groups),
        renormalize=renormalize,
        scoring_func=scoring,
        routed_scaling_factor=scale,
        e_score_correction_bias=torch.randn(16) * 0.1 if biased else None,
    )
    ours = moe.dispatched(theirs)
    assert isinstance(ours, moe.GroupedTopKRouterFL)
    hidden, logits = torch.empty(40, 16), torch.randn(40, 16)
    results = []
    for router in (theirs, ours):
        weights, ids = router.select_experts(hidden, logits)
        ids, order = ids.sort(dim=1)
        results.append((weights.gather(1, order), ids))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(
    "settings",
    [{"scoring_func": "sqrtsoftplus"}, {"num_fused_shared_experts": 1}],
    ids=lambda settings: next(iter(settings)),
)
def test_a_grouped_router_with_other_settings_stays(settings):
    router = GroupedTopKRouter(
        top_k=3, global_num_experts=16, num_expert_group=4, topk_group=2, **settings
    )
    assert moe.dispatched(router) is router


BIASED = list(itertools.product(("softmax", "sigmoid"), (False, True), (1.0, 2.5)))


@pytest.mark.parametrize(("scoring", "renormalize", "scale"), BIASED)
def test_a_router_with_a_bias_chooses_as_vllm_s_formula(scoring, renormalize, scale):
    """Experts by score + bias, weights by the score alone."""
    torch.manual_seed(1)
    bias = torch.randn(16) * 0.1
    router = moe.dispatched(
        FusedTopKBiasRouter(3, 16, bias, renormalize, scale, scoring_func=scoring)
    )
    assert isinstance(router, moe.FusedTopKBiasRouterFL)
    logits = torch.randn(40, 16)
    weights, ids = router.select_experts(torch.empty(40, 16), logits)
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    best = (scores + bias).topk(3).indices
    expected = scores.gather(1, best)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    (best, order), (ids, ours) = best.sort(dim=1), ids.sort(dim=1)
    assert ids.tolist() == best.tolist()
    torch.testing.assert_close(weights.gather(1, ours), scale * expected.gather(1, order))


@pytest.mark.parametrize(
    "settings",
    [
        {"scoring_func": "sqrtsoftplus"},
        {"e_score_correction_bias": None},
        {"hash_indices_table": torch.zeros(8, 3, dtype=torch.int32)},
        {"num_fused_shared_experts": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_router_with_other_settings_stays(settings):
    router = FusedTopKBiasRouter(
        **{"top_k": 3, "global_num_experts": 16, "e_score_correction_bias": torch.zeros(16),
           **settings}
    )  # fmt: skip
    assert moe.dispatched(router) is router


# -- registration


def test_both_routing_operators_replace_the_same_runner():
    classes = layers.layer_classes()
    assert classes["topk_softmax"] == classes["grouped_topk"] == {"MoERunner": moe.MoERunnerFL}
    assert classes["fused_experts"] == {
        "UnquantizedFusedMoEMethod": moe.UnquantizedFusedMoEMethodFL
    }


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.26.0", "v0_26"), ("0.27.1", "v0_26"), ("0.28.0", "v0_28"), ("0.33.0", "v0_28")],
)
def test_an_adapter_serves_the_versions_up_to_the_next(version, name):
    assert adapter_module(ADAPTERS, Version(version)) == name
