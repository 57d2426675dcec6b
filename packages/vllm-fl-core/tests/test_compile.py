"""torch.compile sees a plain function: no graph break, no needless recompilation."""

from __future__ import annotations

import pytest

from vllm_fl.dispatch import BackendImplKind, OpImpl, SelectionPolicy, set_global_policy

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
OP = "silu_and_mul"


def halves(factor):
    def silu_and_mul(x):
        half = x.shape[-1] // 2
        return x[..., :half] * x[..., half:] * factor

    return silu_and_mul


class Layer(torch.nn.Module):
    """Calls an operator as the dispatched layers of vLLM do."""

    def __init__(self, manager):
        super().__init__()
        self._op = manager.bind(OP)

    def forward(self, x):
        fn = self._op.fn
        try:
            return fn(x) + 1
        except Exception as error:
            return self._op.recover(fn, error, x) + 1


@pytest.fixture
def compiled(manager):
    """A compiled layer, and a list that grows with every compilation."""
    kinds = BackendImplKind
    manager.registry.register_many(
        [
            OpImpl(OP, "default.flagos", kinds.DEFAULT, halves(1.0)),
            OpImpl(OP, "vendor.a", kinds.VENDOR, halves(2.0), vendor="a"),
            OpImpl("gelu_and_mul", "reference.torch", kinds.REFERENCE, lambda *a: a),
        ]
    )
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    layer = Layer(manager)
    return torch.compile(layer, fullgraph=True, backend=backend), graphs, layer


def test_a_bound_operator_is_traced_as_one_graph(compiled):
    call, graphs, layer = compiled
    x = torch.randn(3, 8)
    assert torch.equal(call(x), layer(x))
    assert torch.equal(call(x), x[:, :4] * x[:, 4:] + 1)
    assert len(graphs) == 1


def test_only_a_change_of_this_operator_recompiles(compiled):
    call, graphs, _ = compiled
    x = torch.randn(3, 8)
    call(x)
    set_global_policy(SelectionPolicy.from_dict(per_op_order={"gelu_and_mul": ["reference"]}))
    call(x)
    assert len(graphs) == 1
    set_global_policy(SelectionPolicy(prefer="vendor"))
    assert torch.equal(call(x), x[:, :4] * x[:, 4:] * 2 + 1)
    assert len(graphs) == 2


def test_predicates_are_traced_away(manager, compiled):
    call, graphs, _ = compiled
    manager.registry.register_impl(
        OpImpl(OP, "default.flagos.wide", BackendImplKind.DEFAULT, halves(3.0), priority=200,
               dtypes=("float32",), supports=lambda x: x.shape[-1] >= 16 or "too narrow")
    )  # fmt: skip
    wide, narrow = torch.randn(3, 16), torch.randn(3, 8)
    assert torch.equal(call(wide), wide[:, :8] * wide[:, 8:] * 3 + 1)
    assert torch.equal(call(narrow), narrow[:, :4] * narrow[:, 4:] + 1)
    assert torch.equal(call(narrow.double()), narrow.double()[:, :4] * narrow.double()[:, 4:] + 1)
    assert all(len(list(graph.graph.nodes)) > 0 for graph in graphs)
