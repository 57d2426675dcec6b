"""Which experts each token goes to: ``topk_softmax`` and ``grouped_topk``."""

from __future__ import annotations

import torch
from torch import Tensor

SCORING_FUNCTIONS = (0, 1)
"""0: the scores as they are, 1: their sigmoid."""


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose the k experts of each token with the largest softmax probabilities.

    The softmax over all experts comes first, in fp32, then the choice. A stable sort makes the
    lower index win among equal logits, where ``torch.topk`` promises nothing.

    Args:
        topk_weights: ``[tokens, k]`` fp32; written.
        topk_indices: ``[tokens, k]`` of an integer dtype; written.
        token_expert_indices: ``[tokens, k]`` int32; written, ``j * tokens + t`` at ``[t, j]``.
        gating_output: Logits ``[tokens, experts]``, any floating dtype and strides; not modified.
        renormalize: Whether to divide the weights by their sum.

    Returns:
        ``(topk_weights, topk_indices)``, the arguments.

    Raises:
        ValueError: Shapes do not fit together, or k is not between 1 and the number of experts.
    """
    if gating_output.dim() != 2:
        raise ValueError(f"topk_softmax: logits must be 2-D, got {tuple(gating_output.shape)}")
    tokens, experts = gating_output.shape
    k = topk_weights.shape[-1]
    for name, output in (
        ("topk_weights", topk_weights),
        ("topk_indices", topk_indices),
        ("token_expert_indices", token_expert_indices),
    ):
        if output.shape != (tokens, k):
            raise ValueError(
                f"topk_softmax: {name} must be {(tokens, k)}, got {tuple(output.shape)}"
            )
    if not 1 <= k <= experts:
        raise ValueError(f"topk_softmax: k must be between 1 and {experts} experts, got {k}")
    probabilities = torch.softmax(gating_output, dim=-1, dtype=torch.float32)
    weights, indices = _largest(probabilities, k)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_indices.copy_(indices)
    places = torch.arange(tokens * k, dtype=torch.int32, device=gating_output.device)
    token_expert_indices.copy_(places.view(k, tokens).t())
    return topk_weights, topk_indices


def grouped_topk(
    scores: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor | None,
    scoring_func: int = 0,
) -> tuple[Tensor, Tensor]:
    """Choose the best experts of each token among those of its best expert groups.

    Everything is fp32. Experts are chosen by score plus bias, weighted by the score alone
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    Args:
        scores: ``[tokens, experts]``, any floating dtype and strides; not modified.
        n_group: How many groups of neighbouring experts there are, each of two at least.
        topk_group: How many groups are chosen: by the sum of their two best experts when there is
            a bias, by their best expert when there is none.
        topk: How many experts of the chosen groups are chosen.
        renormalize: Whether to divide the weights by their sum.
        routed_scaling_factor: Multiplies the weights in the end.
        bias: ``[experts]``, or None.
        scoring_func: 0 for the scores as they are, 1 for their sigmoid.

    Returns:
        New tensors ``(weights [tokens, topk] fp32, indices [tokens, topk] int32)``, in descending
        order of score plus bias.

    Raises:
        ValueError: The numbers of groups or experts do not fit, or ``scoring_func`` is unknown.
    """
    if scoring_func not in SCORING_FUNCTIONS:
        raise ValueError(f"grouped_topk: scoring_func must be 0 or 1, got {scoring_func}")
    tokens, experts = scores.shape
    size, rest = divmod(experts, n_group)
    if rest or size < 2:
        raise ValueError(
            f"grouped_topk: {experts} experts do not make {n_group} equal groups of two or more"
        )
    if not (1 <= topk_group <= n_group and 1 <= topk <= topk_group * size):
        raise ValueError(
            f"grouped_topk: {topk} experts out of {topk_group} groups cannot be chosen from "
            f"{n_group} groups of {size}"
        )
    plain = scores.to(torch.float32)
    if scoring_func == 1:
        plain = plain.sigmoid()
    ranked = plain if bias is None else plain + bias.to(torch.float32)
    groups = ranked.view(tokens, n_group, size)
    group_scores = groups.topk(1 if bias is None else 2, dim=-1).values.sum(dim=-1)
    _, chosen = _largest(group_scores, topk_group)
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, chosen, True)
    masked = groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).view(tokens, experts)
    _, indices = _largest(masked, topk)
    weights = plain.gather(1, indices)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * routed_scaling_factor, indices.to(torch.int32)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row and their indices, equal ones in order of index."""
    ordered, indices = torch.sort(values, dim=-1, descending=True, stable=True)
    return ordered[:, :count], indices[:, :count]
