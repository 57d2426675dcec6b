"""The experts themselves: ``moe_sum`` and ``fused_experts``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vllm_fl.dispatch.ops import EXPERT_ACTIVATIONS
from vllm_fl.testing.case import Arguments, Case, ConformanceFailure, Subject
from vllm_fl.testing.checks import Inputs, TensorOperator
from vllm_fl.testing.compare import Expected
from vllm_fl.testing.operators.activation import gelu, silu
from vllm_fl.testing.tensors import FLOATS, ROW_LAYOUTS, Maker, far_rows, short

REFUSED = ("relu2", "swigluoai", "gelu_tanh", "silu_no_mul")


def moe_sum(input: Tensor, output: Tensor) -> tuple[Expected | None, ...]:
    """The oracle of ``moe_sum``."""
    wide = input.double()
    return None, Expected(wide.sum(dim=1), output.dtype, wide.abs().sum(dim=1))


def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
    global_num_experts: int,
    expert_map: Tensor | None,
) -> tuple[Expected, ...]:
    """The oracle of ``fused_experts``: one choice after the other."""
    x = hidden_states.double()
    value, scale, slack = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    experts = len(w1) if global_num_experts == -1 else global_num_experts
    mapping = list(range(experts)) if expert_map is None else expert_map.tolist()
    for token, ids in enumerate(topk_ids.tolist()):
        for place, number in enumerate(ids):
            expert = mapping[number] if 0 <= number < experts else -1
            if expert < 0:
                continue
            up_weight, down_weight = w1[expert].double(), w2[expert].double()
            weight = topk_weights[token, place].double()
            row = x[token] * weight if apply_router_weight_on_input else x[token]
            weight = torch.ones_like(weight) if apply_router_weight_on_input else weight
            gate, up = (up_weight @ row).chunk(2)
            act = silu(gate) if activation == "silu" else gelu(gate, "none")
            value[token] += weight * (down_weight @ (act * up))
            # Errors of the products with w1 are relative to gate and up, not to the activation.
            scale[token] += weight.abs() * (down_weight.abs() @ (gate * up).abs())
            gates, ups = (up_weight.abs() @ row.abs()).chunk(2)
            slack[token] += weight.abs() * (down_weight.abs() @ (gates * ups))
    return (Expected(value, hidden_states.dtype, scale, slack=2.0**-21 * slack),)


@dataclass(frozen=True)
class Form:
    """A call of ``fused_experts``.

    Attributes:
        dtype: of hidden states and weights.
        tokens: how many.
        sizes: hidden and inner size.
        experts: how many there are on this rank.
        k: choices of a token.
        activation: as in the contract.
        on_input: ``apply_router_weight_on_input``.
        mapped: whether the rank has every other one of twice as many experts.
        ids: "different", "one" expert for all, or "outside" (some outside the range).
        ids_dtype: of the ids.
        layout: of the hidden states.
        far: what lies 2^31 elements apart: "", "hidden_states", "w1" or "w2".
    """

    dtype: torch.dtype
    tokens: int = 7
    sizes: tuple[int, int] = (64, 48)
    experts: int = 5
    k: int = 2
    activation: str = "silu"
    on_input: bool = False
    mapped: bool = False
    ids: str = "different"
    ids_dtype: torch.dtype = torch.int32
    layout: str = "contiguous"
    far: str = ""

    @property
    def name(self) -> str:
        """All of it."""
        flags = [self.on_input and "on_input", self.mapped and "mapped", self.far and self.far]
        return "-".join(
            [
                f"{short(self.dtype)}-{self.tokens}x{self.sizes[0]}-inner{self.sizes[1]}-"
                f"experts{self.experts}-k{self.k}-{self.activation}-{self.ids}_"
                f"{short(self.ids_dtype)}-{self.layout}",
                *(flag for flag in flags if flag),
            ]
        )

    def make(self, maker: Maker) -> Arguments:
        """Make the arguments."""
        hidden, inner = self.sizes
        total = 2 * self.experts if self.mapped else self.experts
        ids = maker.uniform(self.tokens, total, low=0.0, high=1.0).argsort(dim=-1)[:, : self.k]
        if self.ids == "one":
            ids = torch.full_like(ids, total - 1)
        if self.ids == "outside":
            ids[::3, 0] = -1
            ids[1::3, -1] = total
        expert_map = None
        if self.mapped:
            numbers = torch.arange(total)
            local = torch.where(numbers % 2 == 1, numbers // 2, -1)
            expert_map = maker.place(local, torch.int32, "offset")
        weights = maker.uniform(self.tokens, self.k, low=0.1, high=1.0)
        tensors = {
            "hidden_states": maker.normal(self.tokens, hidden),
            "w1": maker.normal(self.experts, 2 * inner, hidden, scale=hidden**-0.5),
            "w2": maker.normal(self.experts, hidden, inner, scale=inner**-0.5),
        }
        placed = {
            name: far_rows(values, self.dtype, maker.device)
            if name == self.far
            else maker.place(
                values, self.dtype, self.layout if name == "hidden_states" else "contiguous"
            )
            for name, values in tensors.items()
        }
        return {
            **placed,
            "topk_weights": maker.place(weights, torch.float32),
            "topk_ids": maker.place(ids, self.ids_dtype),
            "activation": self.activation,
            "apply_router_weight_on_input": self.on_input,
            "global_num_experts": total if self.mapped else -1,
            "expert_map": expert_map,
        }


def _forms() -> Iterator[Form]:
    for dtype in FLOATS:
        base = Form(dtype)
        for experts in (1, 5, 16, 60):
            for k in sorted({1, min(2, experts), min(10, experts)}):
                yield replace(base, experts=experts, k=k)
        yield replace(base, experts=5, k=5)
        for experts in (144, 160, 257):
            yield replace(base, experts=experts, k=8, sizes=(32, 16))
        for tokens in (0, 1, 2, 33, 150):
            yield replace(base, tokens=tokens)
        for sizes in ((16, 16), (24, 40), (128, 96), (200, 72), (512, 256)):
            yield replace(base, sizes=sizes)
        for activation in EXPERT_ACTIVATIONS:
            for on_input, k in ((True, 1), (True, 2), (False, 3)):
                yield replace(base, activation=activation, on_input=on_input, k=k)
        for ids in ("one", "outside"):
            for mapped in (False, True):
                yield replace(base, ids=ids, mapped=mapped)
        for mapped_experts in (1, 8, 30):
            yield replace(base, mapped=True, experts=mapped_experts, tokens=33)
        yield replace(base, ids_dtype=torch.int64)
        for layout in ("offset", "wide_rows", "packed"):
            yield replace(base, layout=layout)


def _sum(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, outputs: str, maker: Maker
) -> Arguments:
    tokens, _, width = shape
    return {
        "input": maker.place(maker.normal(*shape), dtype, layout),
        "output": maker.place(torch.full((tokens, width), torch.nan), dtype, outputs),
    }


def _far_sum(dtype: torch.dtype, maker: Maker) -> Arguments:
    output = maker.place(torch.full((2, 64), torch.nan), dtype)
    return {"input": far_rows(maker.normal(2, 4, 64), dtype, maker.device), "output": output}


def _sums() -> Iterator[Inputs]:
    for dtype in FLOATS:
        shapes = [(7, k, 64) for k in (1, 2, 3, 4, 5, 8, 10, 16)]
        shapes += [(7, 4, width) for width in (1, 3, 127, 2048, 2880)]
        shapes += [(tokens, 4, 64) for tokens in (0, 1, 300)]
        for shape in shapes:
            run = partial(_sum, shape, dtype, "contiguous", "contiguous")
            yield Inputs(f"{short(dtype)}-{'x'.join(map(str, shape))}", run)
        for layout in ROW_LAYOUTS[1:]:
            run = partial(_sum, (5, 3, 24), dtype, layout, "offset")
            yield Inputs(f"{short(dtype)}-5x3x24-{layout}", run)


def _refuses(activation: str, subject: Subject) -> None:
    """An activation that the operator does not have must not be computed as another one."""
    arguments = {**Form(torch.float32).make(Maker(subject.device)), "activation": activation}
    subject.ask(arguments)
    try:
        subject.call(arguments)
    except ValueError:
        return
    raise ConformanceFailure(f"activation {activation!r} was not refused with ValueError")


def cases() -> Iterator[Case]:
    """Yield the cases of both operators."""
    yield from TensorOperator(
        "moe_sum",
        moe_sum,
        inputs=list(_sums()),
        probes=[
            Inputs(f"{short(d)}-5x8x512", partial(_sum, (5, 8, 512), d, "contiguous", "contiguous"))
            for d in FLOATS
        ],
        far=[Inputs(f"{short(d)}-2x4x64", partial(_far_sum, d)) for d in FLOATS[1:]],
        row_arguments=("input", "output"),
    ).cases()
    probes = [Form(d, tokens=9, sizes=(128, 64), experts=16, k=4, mapped=True) for d in FLOATS]
    far = [
        Form(d, tokens=2, experts=2, k=1, far=name)
        for d in FLOATS[1:]
        for name in ("hidden_states", "w1", "w2")
    ]
    yield from TensorOperator(
        "fused_experts",
        fused_experts,
        inputs=[Inputs(form.name, form.make) for form in dict.fromkeys(_forms())],
        probes=[Inputs(form.name, form.make) for form in probes],
        far=[Inputs(form.name, form.make) for form in far],
        row_arguments=("hidden_states", "topk_weights", "topk_ids"),
    ).cases()
    for activation in REFUSED:
        yield Case("fused_experts", "refusal", activation, partial(_refuses, activation))
