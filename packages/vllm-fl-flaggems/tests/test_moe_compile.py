"""torch.compile and the operators of mixtures of experts: opaque, functional, any token count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensors import normal
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from vllm_fl_flaggems.ops import align, experts, moe_sum, routing

EXPERTS, HIDDEN, INNER, K = 4, 16, 16, 2
W1, W2 = normal(EXPERTS, 2 * INNER, HIDDEN, seed=1), normal(EXPERTS, HIDDEN, INNER, seed=2)


def ids(tokens: int) -> Tensor:
    return (torch.arange(tokens * K, dtype=torch.int32) % EXPERTS).view(tokens, K)


def chosen(tokens: int) -> tuple[object, ...]:
    outs = (torch.zeros(tokens, K), ids(tokens) * 0, ids(tokens) * 0)
    return *outs, normal(tokens, EXPERTS), True


CALLS: dict[str, tuple[Callable[..., object], Callable[[int], tuple[object, ...]]]] = {
    "topk": (routing.topk_softmax, chosen),
    "grouped": (
        routing.grouped_topk,
        lambda t: (normal(t, EXPERTS), 2, 1, K, True, 1.0, None, 1),
    ),
    "align": (align.moe_align_block_size, lambda t: (ids(t), 16, EXPERTS, None, False, False)),
    "sum": (moe_sum.moe_sum, lambda t: (normal(t, K, HIDDEN), torch.zeros(t, HIDDEN))),
    "experts": (
        experts.fused_experts,
        lambda t: (normal(t, HIDDEN), W1, W2, torch.ones(t, K), ids(t)),
    ),
}
WRITTEN = {"topk": (0, 1, 2), "sum": (1,)}


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_for_every_number_of_tokens(name: str) -> None:
    function, make = CALLS[name]
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (7, 9, 5):  # none of them another size, which would make them one symbol
        given, other = make(tokens), make(tokens)
        found, expected = compiled(*given), function(*other)
        results = [] if found is None else zip(found, expected, strict=True)
        pairs = [*results, *((given[i], other[i]) for i in WRITTEN.get(name, ()))]
        assert all(torch.equal(one, two) for one, two in pairs)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", CALLS)
def test_the_operators_keep_torchs_rules(name: str) -> None:
    function, make = CALLS[name]
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        seen.extend(n for n in graph.graph.nodes if "vllm_fl_flaggems" in str(n.target))
        return graph.forward

    torch.compiler.reset()
    torch.compile(function, fullgraph=True, backend=backend, dynamic=False)(*make(5))
    (node,) = seen
    operator = node.target.default if hasattr(node.target, "default") else node.target
    given = {
        "topk": lambda: (normal(5, EXPERTS), K, False, True),
        "sum": lambda: (normal(5, K, HIDDEN),),
        "experts": lambda: (*make(5), "silu", False, -1, None),
    }.get(name, lambda: make(5))
    torch.library.opcheck(operator, given())
