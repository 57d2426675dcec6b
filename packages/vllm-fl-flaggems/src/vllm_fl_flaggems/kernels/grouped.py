"""The best experts of each token among those of its best groups, a few tokens a program.

The experts of a token are a matrix in registers, one group a row.
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


@triton.jit
def _score(x, SIGMOID: tl.constexpr):
    wide = x.to(tl.float32)
    if SIGMOID:
        wide = 1.0 / (1.0 + tl.exp(-wide))
    return wide


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
    real = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    inside = (row < tokens)[:, None, None] & real[None, :, :]
    source = scores + row.to(tl.int64) * row_stride
    found = tl.load(source[:, None, None] + expert[None, :, :], mask=inside, other=0.0)
    ranked = _score(found, SIGMOID)
    if BIASED:
        ranked += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)[None, :, :]
    key = tl.where(real[None, :, :], to_key(ranked), LOWEST)

    best = tl.max(key, axis=2)
    group_score = from_key(best)
    if BIASED:  # with the second best, of which an equal one may be the best again
        first = tl.where(key == best[:, :, None], member[None, None, :], COLUMNS)
        first = tl.min(first, axis=2)[:, :, None]
        rest = tl.where(member[None, None, :] == first, LOWEST, key)
        group_score += from_key(tl.max(rest, axis=2))
    group_key = tl.where((group < GROUPS)[None, :], to_key(group_score), LOWEST)
    allowed = tl.zeros((TOKENS, ROWS), tl.int32)
    for _ in range(CHOSEN_GROUPS):
        top = tl.max(group_key, axis=1)[:, None]
        picked = tl.min(tl.where(group_key == top, group[None, :], ROWS), axis=1)
        taken = group[None, :] == picked[:, None]
        group_key = tl.where(taken, LOWEST, group_key)
        allowed = tl.where(taken, 1, allowed)
    key = tl.where((allowed == 1)[:, :, None], key, LOWEST)

    chosen = tl.zeros((TOKENS, SLOTS), tl.int32)
    for j in range(K):
        top = tl.max(tl.max(key, axis=2), axis=1)
        candidates = tl.where(key == top[:, None, None], expert[None, :, :], GROUPS * SIZE)
        picked = tl.min(tl.min(candidates, axis=2), axis=1)
        key = tl.where(expert[None, :, :] == picked[:, None, None], LOWEST, key)
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
        SLOTS=tile.slots,
        BIASED=bias is not None,
        SIGMOID=sigmoid,
        RENORMALIZE=renormalize,
        num_warps=tile.warps,
        **launch_options(),
    )
