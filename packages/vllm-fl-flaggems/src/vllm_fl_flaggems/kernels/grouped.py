"""The best experts of each token among those of its best groups, a few tokens a program.

The experts of a token are a matrix in registers, one group a row, whose members lie across a warp:
what goes over members is one instruction of the warp, what goes over groups stays within a thread.
"""

# ruff: noqa: ANN001, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_fl_flaggems.kernels.launch import launch_options, wait_for_inputs
from vllm_fl_flaggems.kernels.order import LOWEST, from_key, to_key
from vllm_fl_flaggems.moe_tiles import GroupedTile
from vllm_fl_flaggems.tiles import power_of_2

_UNROLLED = tl.constexpr(16)  # rounds that are compiled one by one


@triton.jit
def _score(x, SIGMOID: tl.constexpr):
    wide = x.to(tl.float32)
    if SIGMOID:
        wide = 1.0 / (1.0 + tl.exp(-wide))
    return wide


@triton.jit
def _best_groups(
    key,
    group,
    member,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOICES: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Return the keys of the best groups, and their experts."""
    best = tl.max(key, axis=2)
    score = from_key(best)
    if BIASED:  # with the second best, which may be equal to the best
        equal = tl.sum((key == best[:, :, None]).to(tl.int32), axis=2)
        below = tl.max(tl.where(key < best[:, :, None], key, LOWEST), axis=2)
        score += from_key(tl.where(equal > 1, best, below))
    rest = tl.where((group < GROUPS)[None, :], to_key(score), LOWEST)
    choice = tl.arange(0, CHOICES)
    keys = tl.full((TOKENS, CHOICES, COLUMNS), LOWEST, tl.int32)
    groups = tl.zeros((TOKENS, CHOICES), tl.int32)
    for j in tl.range(
        CHOSEN_GROUPS, loop_unroll_factor=CHOSEN_GROUPS if CHOSEN_GROUPS <= _UNROLLED else 1
    ):
        top = tl.max(rest, axis=1)[:, None]
        picked = tl.min(tl.where(rest == top, group[None, :], ROWS), axis=1)[:, None]
        taken = group[None, :] == picked
        rest = tl.where(taken, LOWEST, rest)
        own = tl.max(tl.where(taken[:, :, None], key, LOWEST), axis=1)
        keys = tl.where((choice == j)[None, :, None], own[:, None, :], keys)
        groups = tl.where((choice == j)[None, :], picked, groups)
    return keys, groups[:, :, None] * SIZE + member[None, None, :]


@triton.jit(do_not_specialize=["tokens"])
def _grouped_topk_kernel(
    weights,
    indices,
    scores,
    bias,
    tokens,
    row_stride,
    scale,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOICES: tl.constexpr,
    SLOTS: tl.constexpr,
    BIASED: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    group = tl.arange(0, ROWS)
    member = tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    expert = group[:, None] * SIZE + member[None, :]
    # Without this a thread loads several neighbours at once, and a group lies in part of a warp.
    expert = tl.multiple_of(expert, (1, 1))
    real = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    inside = (row < tokens)[:, None, None] & real[None, :, :]
    source = scores + row.to(tl.int64) * row_stride
    found = tl.load(source[:, None, None] + expert[None, :, :], mask=inside, other=0.0)
    ranked = _score(found, SIGMOID)
    if BIASED:
        ranked += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)[None, :, :]
    key = tl.where(real[None, :, :], to_key(ranked), LOWEST)

    if CHOSEN_GROUPS < GROUPS:
        key, expert = _best_groups(
            key, group, member, GROUPS, SIZE, CHOSEN_GROUPS, TOKENS, ROWS, COLUMNS, CHOICES, BIASED
        )
    else:
        expert = expert[None, :, :]
    chosen = tl.zeros((TOKENS, SLOTS), tl.int32)
    for j in tl.range(K, loop_unroll_factor=K if K <= _UNROLLED else 1):
        highest = tl.max(key, axis=1)
        lowest = tl.min(tl.where(key == highest[:, None, :], expert, GROUPS * SIZE), axis=1)
        top = tl.max(highest, axis=1)
        picked = tl.min(tl.where(highest == top[:, None], lowest, GROUPS * SIZE), axis=1)
        key = tl.where(expert == picked[:, None, None], LOWEST, key)
        chosen = tl.where((slot == j)[None, :], picked[:, None], chosen)
    stored = (row < tokens)[:, None] & (slot < K)[None, :]
    share = _score(tl.load(source[:, None] + chosen, mask=stored, other=0.0), SIGMOID)
    if RENORMALIZE:
        share = share / tl.sum(tl.where((slot < K)[None, :], share, 0.0), axis=1)[:, None]
    target = (row.to(tl.int64) * K)[:, None] + slot[None, :]
    tl.store(weights + target, share * scale, mask=stored)
    tl.store(indices + target, chosen, mask=stored)


def grouped_topk(
    weights: Tensor,
    indices: Tensor,
    scores: Tensor,
    bias: Tensor | None,
    groups: tuple[int, int],
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    tile: GroupedTile,
) -> None:
    """Write the weights and the numbers of the chosen experts, in descending order of score.

    Args:
        weights: ``[tokens, k]`` fp32, contiguous, ``tokens`` > 0; overwritten.
        indices: likewise, int32.
        scores: ``[tokens, experts]``, fp16, bf16 or fp32, the last dimension contiguous.
        bias: ``[experts]``, contiguous; or None.
        groups: how many groups there are and how many of them are chosen.
        sigmoid: whether the sigmoid of the scores is taken.
        renormalize: whether to divide the weights by their sum.
        scale: multiplies the weights in the end.
        tile: how the experts lie in registers.
    """
    tokens, experts = scores.shape
    _grouped_topk_kernel[(-(-tokens // tile.tokens),)](
        weights,
        indices,
        scores,
        scores if bias is None else bias,
        tokens,
        scores.stride(0),
        scale,
        GROUPS=groups[0],
        SIZE=experts // groups[0],
        CHOSEN_GROUPS=groups[1],
        K=weights.shape[1],
        TOKENS=tile.tokens,
        ROWS=tile.groups,
        COLUMNS=tile.members,
        CHOICES=power_of_2(groups[1]),
        SLOTS=tile.slots,
        BIASED=bias is not None,
        SIGMOID=sigmoid,
        RENORMALIZE=renormalize,
        num_warps=tile.warps,
        **launch_options(),
    )
