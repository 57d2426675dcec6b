"""Operators of mixtures of experts: routing, sorting by expert, the experts, their sum."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.candidates import flag_gems, inductor, load_vllm
from benchmarks.kernels.operator import (
    OURS,
    Call,
    Inputs,
    Operator,
    Shape,
    Sweep,
    error_of,
    random,
)
from vllm_fl_flaggems import moe_tiles as tiles
from vllm_fl_flaggems.kernels import align as align_kernels
from vllm_fl_flaggems.kernels import grouped as grouped_kernels
from vllm_fl_flaggems.kernels import launch
from vllm_fl_flaggems.kernels import moe_sum as sum_kernels
from vllm_fl_flaggems.kernels import topk as topk_kernels
from vllm_fl_flaggems.kernels.align import Choices
from vllm_fl_flaggems.ops import align, experts, moe_sum, routing
from vllm_fl_reference.ops import moe as plain
from vllm_fl_reference.ops import routing as plain_routing

Agreement = tuple[float, bool]
_LAYERS = "vllm.model_executor.layers.fused_moe"


def of_vllm(module: str, name: str, call: Call) -> Callable[[], Call]:
    """Make a candidate of a function (vLLM's function, arguments) -> results."""

    def load() -> Call:
        load_vllm()
        return functools.partial(call, getattr(importlib.import_module(module), name))

    return load


# -- topk_softmax: (tokens, experts, k) -----------------------------------------------------------


def topk_inputs(shape: Shape, device: str, seed: int) -> Inputs:
    """Return weights, indices, places, logits, renormalize."""
    tokens, count, k = shape
    outs = [torch.empty((tokens, k), dtype=torch.int32, device=device) for _ in range(2)]
    weights = torch.empty((tokens, k), device=device)
    return weights, *outs, random((tokens, count), device, seed), True


def topk_oracle(
    weights: Tensor, indices: Tensor, places: Tensor, logits: Tensor, renormalize: bool
) -> Any:
    """Return the weights in float64, and what every expert would weigh."""
    shares = logits.double().softmax(-1)
    best = shares.topk(weights.shape[1], dim=-1).values
    total = best.sum(-1, keepdim=True)
    return best / total, shares / total


def topk_agree(returned: Any, expected: Any) -> Agreement:
    """Compare the weights, and those of the chosen experts, of which equal ones may change."""
    weights, indices = returned
    best, shares = expected
    chosen = shares.gather(1, indices.to(torch.int64))
    distinct = bool((indices.sort(-1).values.diff(dim=-1) != 0).all())
    error, right = error_of((weights.double(), chosen), (best, best))
    return error, right and distinct


def topk_launch(
    weights: Tensor,
    indices: Tensor,
    places: Tensor,
    logits: Tensor,
    renormalize: bool,
    tile: tiles.TopkTile,
) -> Any:
    """Launch our kernel with a given tile."""
    topk_kernels.topk_softmax(weights, indices, places, logits, renormalize, tile)
    return weights, indices


def topk_other(function: Call, *inputs: Any) -> Any:
    """Call a function that writes to its arguments."""
    function(*inputs)
    return inputs[:2]


TOPK = Operator(
    shapes=[(1, 128, 8), (64, 128, 8), (256, 512, 10), (4096, 128, 8)],
    make=topk_inputs,
    oracle=topk_oracle,
    traffic=lambda shape: 2 * shape[0] * shape[1] + 12 * shape[0] * shape[2],
    candidates={
        OURS: lambda: routing.topk_softmax,
        "vllm": of_vllm("vllm._custom_ops", "topk_softmax", topk_other),
        "inductor": inductor(plain_routing.topk_softmax),
        "flag_gems": flag_gems(lambda gems, *inputs: topk_other(gems.topk_softmax, *inputs)),
    },
    agree=topk_agree,
    sweep=Sweep(
        tile=lambda shape: tiles.topk_tile(*shape),
        rivals=lambda shape: tiles.topk_rivals(*shape[1:]),
        launch=topk_launch,
    ),
)


# -- grouped_topk: (tokens, experts, groups, chosen groups, k) ------------------------------------


def grouped_inputs(shape: Shape, device: str, seed: int) -> Inputs:
    """Return the arguments of ``grouped_topk``."""
    tokens, count, groups, chosen, k = shape
    bias = random((count,), device, 7).float()
    return random((tokens, count), device, seed), groups, chosen, k, True, 2.5, bias, 1


def grouped_oracle(scores: Tensor, *rest: Any) -> Any:
    """Return the weights, and the experts as bits, of the reference."""
    return sorted_by_expert(*plain_routing.grouped_topk(scores, *rest))


def sorted_by_expert(weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in ascending order of expert, as float64."""
    order = indices.sort(-1)
    return weights.gather(1, order.indices).double(), order.values.double()


def grouped_agree(returned: Any, expected: Any) -> Agreement:
    """Compare weights and experts; rounding may choose otherwise in one token of a hundred."""
    weights, indices = sorted_by_expert(*returned)
    same = (indices == expected[1]).all(-1)
    error, right = error_of(weights[same], expected[0][same])
    return error, right and float(same.double().mean()) >= 0.99


def grouped_launch(
    scores: Tensor,
    groups: int,
    chosen: int,
    k: int,
    renormalize: bool,
    scale: float,
    bias: Tensor,
    scoring: int,
    tile: tiles.GroupedTile,
) -> Any:
    """Launch our kernel with a given tile."""
    weights = scores.new_empty((len(scores), k), dtype=torch.float32)
    indices = scores.new_empty((len(scores), k), dtype=torch.int32)
    grouped_kernels.grouped_topk(
        weights, indices, scores, bias, (groups, chosen), scoring == 1, renormalize, scale, tile
    )
    return weights, indices


GROUPED = Operator(
    shapes=[(1, 256, 8, 4, 8), (64, 256, 8, 4, 8), (4096, 256, 8, 4, 8)],
    make=grouped_inputs,
    oracle=grouped_oracle,
    traffic=lambda shape: 2 * shape[0] * shape[1] + 8 * shape[0] * shape[4],
    candidates={
        OURS: lambda: routing.grouped_topk,
        "vllm": of_vllm("vllm._custom_ops", "grouped_topk", lambda f, *inputs: f(*inputs)),
        "inductor": inductor(plain_routing.grouped_topk),
        "flag_gems": flag_gems(lambda gems, *inputs: gems.grouped_topk(*inputs)),
    },
    agree=grouped_agree,
    sweep=Sweep(
        tile=lambda shape: tiles.grouped_tile(shape[1], shape[2], shape[4], shape[0]),
        rivals=lambda shape: tiles.grouped_rivals(shape[1], shape[2], shape[4]),
        launch=grouped_launch,
    ),
)


# -- moe_align_block_size: (tokens, experts, k, block) --------------------------------------------


def choose(tokens: int, count: int, k: int, device: str, seed: int) -> Tensor:
    """Return the ids of k different experts for each token, int32."""
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.rand((tokens, count), generator=generator, device=device).argsort(-1)
    return order[:, :k].to(torch.int32).contiguous()


def align_inputs(shape: Shape, device: str, seed: int) -> Inputs:
    """Return ids, block, experts."""
    tokens, count, k, block = shape
    return choose(tokens, count, k, device, seed), block, count


def align_agree(returned: Any, expected: Any) -> Agreement:
    """Compare what is used, the entries of an expert in any order."""
    used = int(expected[2])
    if int(returned[2]) != used:
        return 1.0, False
    ids = expected[1][expected[1] >= 0]
    block = used // max(1, len(ids))

    def canonical(entries: Tensor) -> Tensor:
        owner = ids.to(torch.int64).repeat_interleave(block)
        return (owner * (1 << 32) + entries[:used].to(torch.int64)).sort().values

    same = torch.equal(returned[1][: len(ids)].to(torch.int64), ids.to(torch.int64))
    right = same and torch.equal(canonical(returned[0]), canonical(expected[0]))
    return float(not right), right


def align_launch(ids: Tensor, block: int, count: int, tile: tiles.AlignTile) -> Any:
    """Launch our kernels with a given tile."""
    outs = align.outputs(ids, ids.numel(), block, count, False)
    align_kernels.align(*outs, Choices(ids, count, count), block, tile)
    return outs


ALIGN = Operator(
    shapes=[(1, 128, 8, 16), (64, 128, 8, 16), (256, 512, 10, 16), (4096, 128, 8, 64)],
    make=align_inputs,
    oracle=plain.moe_align_block_size,
    traffic=lambda shape: 8 * shape[0] * shape[2] + 4 * shape[1] * shape[3],
    candidates={
        OURS: lambda: align.moe_align_block_size,
        "vllm": of_vllm(
            f"{_LAYERS}.moe_align_block_size", "moe_align_block_size", lambda f, *inputs: f(*inputs)
        ),
        "inductor": inductor(plain.moe_align_block_size),
        "flag_gems": flag_gems(lambda gems, *inputs: gems.moe_align_block_size(*inputs)),
    },
    agree=align_agree,
    sweep=Sweep(
        tile=lambda shape: tiles.align_tile(shape[0] * shape[2], shape[1], shape[3]),
        rivals=lambda shape: tiles.align_rivals(shape[0] * shape[2], shape[1], shape[3]),
        launch=align_launch,
    ),
)


# -- moe_sum: (tokens, k, width) ------------------------------------------------------------------


def sum_inputs(shape: Shape, device: str, seed: int) -> Inputs:
    """Return input, output."""
    return random(shape, device, seed), random((shape[0], shape[2]), device, seed)


def written(function: Call, x: Tensor, out: Tensor) -> Tensor:
    """Call a function that writes to its second argument."""
    function(x, out)
    return out


def sum_launch(x: Tensor, out: Tensor, tile: tiles.SumTile) -> Tensor:
    """Launch our kernel with a given tile."""
    sum_kernels.moe_sum(out, x, tile)
    return out


SUM = Operator(
    shapes=[(1, 8, 2048), (64, 8, 2048), (4096, 8, 2048), (4096, 2, 4096)],
    make=sum_inputs,
    oracle=lambda x, out: x.double().sum(1),
    traffic=lambda shape: 2 * math.prod(shape) + 2 * shape[0] * shape[2],
    candidates={
        OURS: lambda: functools.partial(written, moe_sum.moe_sum),
        "vllm": of_vllm("vllm._custom_ops", "moe_sum", written),
        "inductor": inductor(functools.partial(written, plain.moe_sum)),
        "flag_gems": flag_gems(lambda gems, *inputs: written(gems.moe_sum, *inputs)),
    },
    sweep=Sweep(
        tile=lambda shape: tiles.sum_tile(shape[0], shape[2]),
        rivals=lambda shape: tiles.sum_rivals(shape[2]),
        launch=sum_launch,
    ),
)


# -- fused_experts: (tokens, experts, k, hidden, inner) -------------------------------------------

QWEN3_30B_A3B = (128, 8, 2048, 768)
MIXTRAL_8X7B = (8, 2, 4096, 14336)


@functools.lru_cache(maxsize=1)
def expert_weights(count: int, hidden: int, inner: int, device: str) -> tuple[Tensor, Tensor]:
    """Return w1 and w2, the same for all calls as in a model."""
    w1 = random((count, 2 * inner, hidden), device, 11).mul_(hidden**-0.5)
    return w1, random((count, hidden, inner), device, 12).mul_(inner**-0.5)


def experts_inputs(shape: Shape, device: str, seed: int) -> Inputs:
    """Return hidden states, w1, w2, weights, ids."""
    tokens, count, k, hidden, inner = shape
    generator = torch.Generator(device).manual_seed(seed)
    weights = torch.rand((tokens, k), generator=generator, device=device)
    weights /= weights.sum(-1, keepdim=True)
    ids = choose(tokens, count, k, device, seed)
    return (
        random((tokens, hidden), device, seed),
        *expert_weights(count, hidden, inner, device),
        weights,
        ids,
    )


def experts_oracle(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Return the result in float64, one expert after the other."""
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        tokens, places = torch.where(ids == expert)
        gate, up = (x[tokens].double() @ w1[expert].double().t()).chunk(2, dim=-1)
        result = (torch.nn.functional.silu(gate) * up) @ w2[expert].double().t()
        total.index_add_(0, tokens, result * weights[tokens, places].double()[:, None])
    return total


def experts_traffic(shape: Shape) -> float:
    """Return the bytes of the experts that are chosen, on average, and of inputs and outputs."""
    tokens, count, k, hidden, inner = shape
    chosen = count * (1 - (1 - k / count) ** tokens)
    return 6.0 * chosen * hidden * inner + 4.0 * tokens * hidden


def experts_launch(
    x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, tile: tiles.ExpertsTile
) -> Tensor:
    """Launch our kernels with given tiles."""
    out = torch.empty_like(x)
    choices = Choices(ids, len(w1), len(w1), local=True)
    experts.run_experts(out, x, w1, w2, weights, choices, "silu", False, tile)
    return out


def experts_tile(shape: Shape) -> tiles.ExpertsTile:
    """Return the tile chosen for a shape."""
    tokens, count, k, hidden, inner = shape
    return tiles.experts_tile(tokens, k, count, hidden, inner, 2, launch.shared_memory())


EXPERTS = Operator(
    shapes=[
        *((tokens, *QWEN3_30B_A3B) for tokens in (1, 16, 64, 128, 256, 1024, 4096, 32768)),
        *((tokens, *MIXTRAL_8X7B) for tokens in (1, 64, 4096)),
    ],
    make=experts_inputs,
    oracle=experts_oracle,
    traffic=experts_traffic,
    flops=lambda shape: 6.0 * shape[0] * shape[2] * shape[3] * shape[4],
    # Results of both products and of the activation are rounded, too, and summed with other signs.
    agree=functools.partial(error_of, slack=2**-5),
    in_mean=False,
    candidates={
        OURS: lambda: experts.fused_experts,
        "vllm": of_vllm(f"{_LAYERS}.fused_moe", "fused_experts", lambda f, *inputs: f(*inputs)),
        "flag_gems": flag_gems(lambda gems, *inputs: gems.fused_experts_impl(*inputs)),
    },
    sweep=Sweep(
        tile=experts_tile,
        rivals=lambda shape: tiles.experts_rivals(experts_tile(shape), 2, launch.shared_memory()),
        launch=experts_launch,
    ),
)

OPERATORS = {
    "topk_softmax": TOPK,
    "grouped_topk": GROUPED,
    "moe_align_block_size": ALIGN,
    "moe_sum": SUM,
    "fused_experts": EXPERTS,
}
