"""The mixture-of-experts operators in the catalogue, and what "written" means for a call."""

from __future__ import annotations

import inspect

import pytest

from vllm_fl.dispatch import BackendImplKind, OpImpl
from vllm_fl.dispatch.ops import get_spec

torch = pytest.importorskip("torch")

SIGNATURES = {
    "topk_softmax": "(topk_weights, topk_indices, token_expert_indices, gating_output, "
    "renormalize=False)",
    "grouped_topk": "(scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, "
    "bias, scoring_func=0)",
    "moe_align_block_size": "(topk_ids, block_size, num_experts, expert_map=None, "
    "pad_sorted_ids=False, ignore_invalid_experts=False)",
    "moe_sum": "(input, output)",
    "fused_experts": "(hidden_states, w1, w2, topk_weights, topk_ids, activation='silu', "
    "apply_router_weight_on_input=False, global_num_experts=-1, expert_map=None)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signatures_users_know(name):
    empty = inspect.Parameter.empty
    bare = [p.replace(annotation=empty) for p in get_spec(name).signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


def test_the_outputs_of_a_call_in_the_order_of_the_signature():
    topk = get_spec("topk_softmax")
    assert topk.outputs((1, 2, 3, 4), {"renormalize": True}) == (1, 2, 3)
    assert topk.outputs((1,), {"gating_output": 4, "token_expert_indices": 3, "topk_indices": 2}) \
        == (1, 2, 3)  # fmt: skip
    assert get_spec("moe_sum").outputs((1, 2), {}) == (2,)
    assert get_spec("fused_experts").outputs((1, 2, 3, 4, 5), {}) == ()


def test_outputs_are_not_donated():
    assert not get_spec("topk_softmax").donates((1, 2, 3, 4), {})
    assert not get_spec("moe_sum").donates((1, 2), {})


def test_a_call_that_fails_after_writing_is_repeated_on_the_same_outputs(manager):
    def fails_half_way(input, output):
        output.fill_(7.0)
        raise ArithmeticError("no further")

    def works(input, output):
        output.copy_(input.sum(1))

    manager.registry.register_many(
        [
            OpImpl("moe_sum", "vendor.acme", BackendImplKind.VENDOR, fails_half_way, "acme"),
            OpImpl("moe_sum", "reference.torch", BackendImplKind.REFERENCE, works),
        ]
    )
    output = torch.full((2, 4), torch.nan)
    assert manager.call("moe_sum", torch.ones(2, 3, 4), output) is None
    assert output.tolist() == [[3.0] * 4] * 2
    assert "no further" in manager.get_failed_impls("moe_sum")["moe_sum"]["vendor.acme"]
