"""Which experts each token goes to: ``topk_softmax`` and ``grouped_topk``.

Scores are whole multiples of a step that every dtype can hold, in random order: experts either
differ so clearly that no rounding can change the choice, or are exactly equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_fl.testing.case import Arguments, Case
from vllm_fl.testing.checks import Inputs, Results, TensorOperator
from vllm_fl.testing.compare import Expected
from vllm_fl.testing.tensors import FLOATS, Maker, far_rows, short

EXPERTS = (1, 5, 16, 60, 144, 160, 257)
UNWRITTEN = -7  # what integer outputs hold before the call


def ranked(values: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values of each row, equal ones in order of index."""
    return torch.sort(values, dim=-1, descending=True, stable=True)[1][..., :count]


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool,
) -> tuple[Expected, ...]:
    """The oracle of ``topk_softmax``."""
    wide = gating_output.double()
    odds = torch.exp(wide - wide.amax(dim=-1, keepdim=True))
    tokens, k = topk_weights.shape
    indices = ranked(wide, k)
    weights = (odds / odds.sum(dim=-1, keepdim=True)).gather(1, indices)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    places = torch.arange(k) * tokens + torch.arange(tokens)[:, None]
    chosen = (
        Expected(weights, torch.float32),
        Expected(indices.double(), topk_indices.dtype),
    )
    return (*chosen, *chosen, Expected(places.double(), torch.int32))


def grouped_topk(
    scores: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor | None,
    scoring_func: int,
) -> tuple[Expected, ...]:
    """The oracle of ``grouped_topk``; the experts of a token in ascending order."""
    plain = scores.double()
    if scoring_func == 1:
        plain = 1 / (1 + torch.exp(-plain))
    score = plain if bias is None else plain + bias.double()
    groups = score.unflatten(1, (n_group, -1))
    best = groups.sort(dim=-1, descending=True)[0]
    rank = best[..., 0] if bias is None else best[..., 0] + best[..., 1]
    outside = torch.ones(rank.shape, dtype=torch.bool).scatter(1, ranked(rank, topk_group), False)
    allowed = groups.masked_fill(outside[..., None], -torch.inf).flatten(1)
    indices = ranked(allowed, topk).sort(dim=-1)[0]
    weights = plain.gather(1, indices)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    weights = weights * routed_scaling_factor
    return Expected(weights, torch.float32), Expected(indices.double(), torch.int32)


def by_expert(results: Results, arguments: Arguments) -> Results:
    """Bring the experts of each token into ascending order."""
    if len(results) != 2:
        return results
    weights, indices = results
    if weights is None or indices is None or weights.shape != indices.shape:
        return results
    indices, order = indices.sort(dim=-1)
    return weights.gather(1, order), indices


def steps(maker: Maker, tokens: int, experts: int) -> Tensor:
    """Return whole numbers from 0 on, each once a row, in random order."""
    return maker.uniform(tokens, experts, low=0.0, high=1.0).argsort(dim=-1).float()


@dataclass(frozen=True)
class Gate:
    """A call of ``topk_softmax``.

    Attributes:
        dtype: of the logits.
        experts: how many.
        k: how many of them are chosen.
        tokens: how many.
        renormalize: as in the contract.
        logits: "spread", "ties", "equal", "large" or "masked" (some are -inf).
        layout: of the logits.
        indices: dtype of the indices.
        outputs: layout of the outputs.
    """

    dtype: torch.dtype
    experts: int = 60
    k: int = 4
    tokens: int = 7
    renormalize: bool = False
    logits: str = "spread"
    layout: str = "contiguous"
    indices: torch.dtype = torch.int32
    outputs: str = "contiguous"

    @property
    def name(self) -> str:
        """All of it."""
        return (
            f"{short(self.dtype)}-{self.tokens}x{self.experts}-k{self.k}-{self.logits}-"
            f"{self.layout}-{short(self.indices)}-{self.outputs}"
            f"{'-renormalize' if self.renormalize else ''}"
        )

    def values(self, maker: Maker) -> Tensor:
        """Make the logits."""
        order = steps(maker, self.tokens, self.experts)
        if self.logits == "ties":
            return maker.integers(self.tokens, self.experts, high=4) / 2.0
        if self.logits == "equal":
            return torch.full_like(order, 3.0)
        spread = (order - self.experts // 2) / 16
        if self.logits == "large":  # exp() of these overflows fp32, and fp16 long before
            return spread * 64
        if self.logits == "masked":
            return spread.masked_fill(order < self.experts - self.k, -torch.inf)
        return spread

    def make(self, maker: Maker) -> Arguments:
        """Make the arguments."""
        return self.around(maker, maker.place(self.values(maker), self.dtype, self.layout))

    def far(self, maker: Maker) -> Arguments:
        """Make arguments whose rows of logits are 2^31 elements apart."""
        return self.around(maker, far_rows(self.values(maker), self.dtype, maker.device))

    def around(self, maker: Maker, gating: Tensor) -> Arguments:
        """Make the arguments around given logits."""
        shape = (self.tokens, self.k)
        unwritten = torch.full(shape, UNWRITTEN)
        return {
            "topk_weights": maker.place(torch.full(shape, torch.nan), layout=self.outputs),
            "topk_indices": maker.place(unwritten, self.indices, self.outputs),
            "token_expert_indices": maker.place(unwritten, torch.int32, self.outputs),
            "gating_output": gating,
            "renormalize": self.renormalize,
        }


def _gates() -> Iterator[Gate]:
    for dtype in FLOATS:
        base = Gate(dtype)
        for experts in EXPERTS:
            for k in sorted({1, min(2, experts), min(8, experts), min(12, experts), experts}):
                yield replace(base, experts=experts, k=k, renormalize=k % 2 == 0)
        for logits in ("ties", "equal", "large", "masked"):
            for experts, k in ((5, 2), (60, 4), (144, 10), (257, 8)):
                experts = min(experts, 60) if logits == "large" else experts
                yield replace(base, experts=experts, k=k, logits=logits)
                yield replace(base, experts=experts, k=k, logits=logits, renormalize=True)
        for tokens in (0, 1, 33, 300):
            yield replace(base, tokens=tokens, renormalize=True)
        for layout in ("offset", "wide_rows", "packed"):
            yield replace(base, layout=layout)
        yield replace(base, indices=torch.int64)
        yield replace(base, outputs="offset")


@dataclass(frozen=True)
class Groups:
    """A call of ``grouped_topk``.

    Attributes:
        dtype: of the scores.
        experts: how many.
        groups: how many groups there are, and how many of them are chosen.
        k: how many experts are chosen.
        scoring: 0 or 1.
        bias: dtype of the bias, None for no bias.
        tokens: how many.
        renormalize: as in the contract.
        scale: ``routed_scaling_factor``.
        ties: whether scores and biases are exactly equal often.
        layout: of the scores.
    """

    dtype: torch.dtype
    experts: int = 60
    groups: tuple[int, int] = (5, 2)
    k: int = 4
    scoring: int = 1
    bias: torch.dtype | None = torch.float32
    tokens: int = 7
    renormalize: bool = True
    scale: float = 1.0
    ties: bool = False
    layout: str = "contiguous"

    @property
    def name(self) -> str:
        """All of it."""
        return (
            f"{short(self.dtype)}-{self.tokens}x{self.experts}-groups{self.groups[0]}_"
            f"{self.groups[1]}-k{self.k}-{'sigmoid' if self.scoring else 'plain'}-"
            f"bias_{short(self.bias) if self.bias else 'none'}-{self.layout}-{self.scale:g}"
            f"{'-ties' if self.ties else ''}{'-renormalize' if self.renormalize else ''}"
        )

    def values(self, maker: Maker) -> Tensor:
        """Make the scores; those that are taken as they are are positive."""
        if self.ties:
            return (1 + maker.integers(self.tokens, self.experts, high=3)) / 4.0
        order = steps(maker, self.tokens, self.experts)
        return (order - self.experts // 2) / 16 if self.scoring else (order + 1) / 32

    def make(self, maker: Maker) -> Arguments:
        """Make the arguments."""
        return self.around(maker, maker.place(self.values(maker), self.dtype, self.layout))

    def far(self, maker: Maker) -> Arguments:
        """Make arguments whose rows of scores are 2^31 elements apart."""
        return self.around(maker, far_rows(self.values(maker), self.dtype, maker.device))

    def around(self, maker: Maker, scores: Tensor) -> Arguments:
        """Make the arguments around given scores."""
        bias = None
        if self.bias is not None:
            values = maker.integers(self.experts, high=2) / 2.0
            if not self.ties:
                values = maker.normal(self.experts, scale=0.5)
            bias = maker.place(values, self.bias, "offset")
        return {
            "scores": scores,
            "n_group": self.groups[0],
            "topk_group": self.groups[1],
            "topk": self.k,
            "renormalize": self.renormalize,
            "routed_scaling_factor": self.scale,
            "bias": bias,
            "scoring_func": self.scoring,
        }


# experts, (groups, chosen groups), k: all of the chosen groups' experts, one, more than eight, ...
GROUPINGS = (
    (4, (2, 1), 2),
    (5, (1, 1), 5),
    (16, (4, 2), 1),
    (16, (8, 3), 6),
    (60, (5, 2), 10),
    (144, (8, 8), 8),
    (160, (8, 3), 6),
    (256, (8, 4), 8),
    (256, (32, 20), 32),
    (257, (1, 1), 8),
)


def _groups() -> Iterator[Groups]:
    for dtype in FLOATS:
        base = Groups(dtype)
        for experts, groups, k in GROUPINGS:
            for bias in (None, torch.float32):
                for scoring in (0, 1):
                    yield replace(
                        base, experts=experts, groups=groups, k=k, bias=bias, scoring=scoring
                    )
        for bias in (None, torch.float32):
            ties = replace(base, bias=bias, ties=True)
            yield from (replace(ties, scoring=0), replace(ties, experts=160, groups=(8, 3), k=12))
            yield replace(base, bias=bias, renormalize=False)
            yield replace(base, bias=bias, renormalize=False, scale=2.5)
            yield replace(base, bias=bias, scale=2.5)
            for tokens in (0, 1, 300):
                yield replace(base, bias=bias, tokens=tokens)
        yield replace(base, bias=torch.bfloat16)
        for layout in ("offset", "wide_rows", "packed"):
            yield replace(base, layout=layout)


def _inputs(forms: Iterable[Gate | Groups]) -> list[Inputs]:
    return [Inputs(form.name, form.make) for form in dict.fromkeys(forms)]


def cases() -> Iterator[Case]:
    """Yield the cases of both operators."""
    gates = [Gate(d, 144, 8, 5, renormalize=True) for d in FLOATS]
    yield from TensorOperator(
        "topk_softmax",
        topk_softmax,
        inputs=_inputs(_gates()),
        probes=_inputs(gates),
        far=[Inputs(g.name, replace(g, tokens=2).far) for g in gates[1:]],
    ).cases()
    groups = [Groups(d, 256, (8, 4), 8, tokens=5, scale=2.5) for d in FLOATS]
    yield from TensorOperator(
        "grouped_topk",
        grouped_topk,
        inputs=_inputs(_groups()),
        probes=_inputs(groups),
        far=[Inputs(g.name, replace(g, tokens=2).far) for g in groups[1:]],
        row_arguments=("scores",),
        canonical=by_expert,
    ).cases()
