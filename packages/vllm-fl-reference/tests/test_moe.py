"""What the mixture-of-experts operators refuse; the conformance kit checks what they compute."""

from __future__ import annotations

import pytest
import torch

from vllm_fl_reference.ops.moe import fused_experts, moe_sum
from vllm_fl_reference.ops.routing import grouped_topk, topk_softmax


def outputs(tokens: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = torch.empty(tokens, k)
    return weights, weights.int(), weights.int()


@pytest.mark.parametrize(
    ("tokens", "k", "logits", "reason"),
    [
        (3, 2, (3,), "logits must be 2-D"),
        (4, 2, (3, 8), r"topk_weights must be \(3, 2\), got \(4, 2\)"),
        (3, 9, (3, 8), "k must be between 1 and 8 experts, got 9"),
        (3, 0, (3, 8), "k must be between 1 and 8 experts, got 0"),
    ],
)
def test_topk_softmax_refuses(tokens, k, logits, reason):
    with pytest.raises(ValueError, match=reason):
        topk_softmax(*outputs(tokens, k), torch.zeros(logits))


@pytest.mark.parametrize(
    ("groups", "chosen", "k", "scoring", "reason"),
    [
        (3, 1, 1, 0, "16 experts do not make 3 equal groups"),
        (16, 1, 1, 0, "16 experts do not make 16 equal groups of two or more"),
        (4, 5, 1, 0, "cannot be chosen from 4 groups of 4"),
        (4, 2, 9, 0, "9 experts out of 2 groups cannot be chosen"),
        (4, 2, 2, 2, "scoring_func must be 0 or 1, got 2"),
    ],
)
def test_grouped_topk_refuses(groups, chosen, k, scoring, reason):
    with pytest.raises(ValueError, match=reason):
        grouped_topk(torch.zeros(3, 16), groups, chosen, k, True, 1.0, None, scoring)


def test_moe_sum_refuses():
    with pytest.raises(ValueError, match="do not fit"):
        moe_sum(torch.zeros(3, 2, 8), torch.zeros(3, 7))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": "swigluoai"}, "activation must be one of silu, gelu, got 'swigluoai'"),
        ({"w2": torch.zeros(4, 8, 5)}, "do not fit together"),
        ({"hidden_states": torch.zeros(3, 7)}, "do not fit together"),
        ({"topk_ids": torch.zeros(3, 1, dtype=torch.int32)}, "do not fit 3 tokens"),
    ],
)
def test_fused_experts_refuses(change, reason):
    call = {
        "hidden_states": torch.zeros(3, 8),
        "w1": torch.zeros(4, 12, 8),
        "w2": torch.zeros(4, 8, 6),
        "topk_weights": torch.zeros(3, 2),
        "topk_ids": torch.zeros(3, 2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=reason):
        fused_experts(**{**call, **change})
