"""The operator catalogue: one stub function an operator.

The stub's signature is the contract that every implementation must accept, its docstring the
documentation; tables, tests and signature checks are made from here. Shapes: T tokens, H heads,
D head size. "Donated" means that an implementation may overwrite the argument's storage (and
return it), so the caller must not read the argument afterwards. "Written" arguments are outputs:
an implementation fills them whole, whatever they held. "Updated" arguments are state: an
implementation changes the part that the other arguments name, and nothing else of them.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch.errors import UnknownOperatorError, nearest
from vllm_fl.dispatch.spec import OpSpec

if TYPE_CHECKING:
    from torch import Tensor


# vLLM's own tolerances (vllm/ir/tolerances.py): float16 widened for one rounding more.
_FLOAT_TOLERANCES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"float32": (1.3e-6, 1e-5), "float16": (2e-3, 1e-3), "bfloat16": (1.6e-2, 1e-3)}
)
PHASES = ("decode", "prefill")
"""Of the engine's steps; what they are, see ``phases``."""
_SPECS: dict[str, OpSpec] = {}


def _operator(
    *,
    donated: tuple[str, ...] = (),
    donated_when: str | None = None,
    written: tuple[str, ...] = (),
    updated: tuple[str, ...] = (),
    phases: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def declare(stub: Callable[..., Any]) -> Callable[..., Any]:
        name = stub.__name__
        _SPECS[name] = OpSpec(
            name=name,
            signature=inspect.signature(stub),
            doc=inspect.cleandoc(stub.__doc__ or ""),
            donated=frozenset(donated),
            donated_when=donated_when,
            written=frozenset(written),
            updated=frozenset(updated),
            tolerances=_FLOAT_TOLERANCES,
            phases=phases,
        )
        return stub

    return declare


@_operator()
def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU activation: silu(x[..., :d]) * x[..., d:].

    x [..., 2d], any strides, fp32/fp16/bf16 -> [..., d], same dtype, new storage. The gate half
    comes first. Source: vLLM ``SiluAndMul``.
    """


@_operator()
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """GeGLU activation: gelu(x[..., :d]) * x[..., d:].

    x [..., 2d], any strides -> [..., d], same dtype, new storage. ``approximate`` is "none" (erf)
    or "tanh". Source: vLLM ``GeluAndMul``.
    """


@_operator(donated=("x", "residual"), donated_when="residual")
def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square normalisation over the last dimension, with an optional residual add.

    x [..., n], any strides; residual None or the shape of x; weight [n]. Without residual: new
    storage, x * rsqrt(mean(x^2) + epsilon) * weight, x untouched. With residual: returns
    (normalised x + residual, x + residual); both arguments are donated. Statistics in fp32; the
    normalised value is rounded to the dtype of the weight before the product with the weight, and
    the product to the dtype of x.
    Source: vLLM ``RMSNorm``; Zhang and Sennrich 2019, arXiv:1910.07467.
    """


@_operator()
def gemma_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square normalisation with scale 1 + weight (Gemma models).

    As ``rms_norm``, but the scale is (1 + weight) summed in fp32, the product is formed in fp32
    and rounded once, and nothing is donated: the results have new storage.
    Source: vLLM ``GemmaRMSNorm``.
    """


@_operator(donated=("query", "key"))
def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    is_neox_style: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rotary position embedding of query and key.

    query [T, H, D] and key [T, Hk, D] or None, any strides with a contiguous last dimension;
    cos, sin [max_position, rotary_dim / 2]; position_ids [T] int64. rotary_dim may be smaller
    than D: the tail passes through unchanged. Neox style rotates halves, otherwise interleaved
    pairs. query and key are donated; returns (query, key) of the same shapes.
    Source: vLLM ``RotaryEmbedding``; Su et al. 2021, arXiv:2104.09864.
    """


@_operator(phases=PHASES)
def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """The attention backend class for vLLM, as the text "package.module:Class".

    Called once a layer group when the model is built; the class is a subclass of vLLM's
    ``AttentionBackend`` whose ``validate_configuration`` refuses, with reasons, what it cannot do.
    With decode context parallelism its implementation class must say that it ``supports_dcp`` and
    ``can_return_lse_for_decode``.
    Steps in which every request has one new token (phase ``decode``) may have another class than
    all others (``prefill``), if both lay the cache out in the same way.
    Source: vLLM ``Platform.get_attn_backend_cls``.
    """


@_operator(updated=("key_cache", "value_cache"))
def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write the keys and values of new tokens into their slots of the paged cache.

    key [T', Hk, D] and value [T', Hk, Dv], fp32/fp16/bf16, any strides with a contiguous last
    dimension. Updated: key_cache [blocks, block_size, Hk, D] and value_cache
    [blocks, block_size, Hk, Dv] of the same dtype, views with any strides over blocks, positions
    and heads and a contiguous last dimension (heads may lie inside or outside positions, and both
    may be slices of one tensor). slot_mapping [T] int64, T <= T': token t goes to block
    slot // block_size, position slot % block_size; -1 is padding and is skipped, as are the rows
    of key and value from T on. No slot occurs twice. Values are copied bit by bit, and nothing
    else of the caches changes. Source: vLLM ``reshape_and_cache_flash``.
    """


@_operator(written=("topk_weights", "topk_indices", "token_expert_indices"))
def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """The k experts of each token with the largest softmax probabilities.

    gating_output [T, E] fp32/fp16/bf16, contiguous last dimension; 1 <= k <= E; a row may hold
    -inf. Written, all [T, k] and contiguous: topk_weights fp32, the probabilities in descending
    order, computed in fp32 over all E (first the softmax, then the choice), divided by their sum
    over the k if ``renormalize``; topk_indices int32 or int64, their experts; token_expert_indices
    int32, j * T + t at [t, j]. Of experts with equal logits the lower index comes first. Returns
    (topk_weights, topk_indices), the arguments themselves. Source: vLLM ``ops.topk_softmax``.
    """


@_operator()
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
    """The best experts of each token among those of its best expert groups.

    scores [T, E] fp32/fp16/bf16, contiguous last dimension; E = n_group groups of at least two
    neighbours; bias [E], any floating dtype, or None. ``scoring_func`` 0 takes the scores as they
    are, 1 their sigmoid; then everything is fp32. Experts are chosen by score + bias: first the
    topk_group groups, ranked by the sum of their two best experts when there is a bias and by
    their best expert when there is none, then topk experts of these groups
    (topk <= topk_group * E / n_group). Of equal groups or experts the lower index is chosen.
    Returns new (weights [T, topk] fp32, indices [T, topk] int32), the experts of a token in any
    order. A weight is the score without the bias, divided by the sum over the topk if
    ``renormalize`` (the sum must be positive), times ``routed_scaling_factor``.
    Source: vLLM ``ops.grouped_topk``; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """


@_operator()
def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the T * k choices by expert and pad each expert's part to whole blocks.

    topk_ids [T, k] int32 or int64, contiguous; choices outside [0, num_experts) are left out;
    expert_map [num_experts] int32, global -> local expert or -1, or None. Returns new int32
    tensors, defined in every entry:

    - sorted_ids [S]: the positions in topk_ids flattened, in ascending order of expert, those of
      an expert in any order; T * k everywhere else. S = T * k + num_experts * (block_size - 1),
      rounded up to a block if ``pad_sorted_ids``, and at most T * k * block_size when
      T * k < num_experts.
    - expert_ids [ceil(S / block_size)]: the expert of each block, through expert_map when there
      is one (-1: not in the map); -1 after the last block.
    - num_tokens_post_pad [1]: entries of sorted_ids up to the end of the last block.

    With expert_map and ``ignore_invalid_experts`` choices that map to -1 are left out, and the
    order is that of the local experts. Source: vLLM ``moe_align_block_size``.
    """


@_operator(written=("output",))
def moe_sum(input: Tensor, output: Tensor) -> None:
    """Sum over the experts of each token.

    input [T, k, N] fp32/fp16/bf16, any strides with a contiguous last dimension. Written: output
    [T, N], same dtype, contiguous. Sums in fp32 are rounded once; rounding after each addition is
    within the tolerance. Source: vLLM ``ops.moe_sum``.
    """


EXPERT_ACTIVATIONS = ("silu", "gelu")
"""What ``activation`` of ``fused_experts`` may be."""


@_operator()
def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Mixture of experts, unquantised: sum_j weight_j * (act(x @ gate_j) * (x @ up_j)) @ down_j.

    hidden_states x [T, H] fp32/fp16/bf16, contiguous last dimension; w1 [E, 2I, H] (gate rows
    first) and w2 [E, H, I] of its dtype, contiguous last dimensions; topk_weights [T, k] fp32;
    topk_ids [T, k] int32 or int64. ``activation`` is "silu" or "gelu" (erf); others are refused
    with ValueError. ``global_num_experts`` is the range of the ids, -1 for E; expert_map
    [global_num_experts] int32 maps them to rows of w1, or to -1. What maps to -1, and ids outside
    the range, add nothing; a token without any expert here gets zeros. With
    ``apply_router_weight_on_input`` the weight multiplies x instead of the expert's result.
    Returns [T, H], same dtype, new storage. Products are summed in fp32; the results of w1, of
    the activation and of each expert may be rounded to the dtype, and their sum is fp32.
    Source: vLLM ``fused_experts``; Shazeer et al. 2017, arXiv:1701.06538.
    """


def check_expert_activation(activation: str) -> None:
    """Check the argument ``activation`` of ``fused_experts``, as its contract asks for.

    Raises:
        ValueError: it is unknown.
    """
    if activation not in EXPERT_ACTIVATIONS:
        raise ValueError(
            f"fused_experts: activation must be one of {', '.join(EXPERT_ACTIVATIONS)}, got "
            f"{activation!r}"
        )


CATALOGUE: Mapping[str, OpSpec] = MappingProxyType(_SPECS)


def get_spec(op_name: str) -> OpSpec:
    """Return the operator's specification.

    Raises:
        UnknownOperatorError: with the nearest valid name.
    """
    spec = CATALOGUE.get(op_name)
    if spec is None:
        raise UnknownOperatorError(f"Unknown operator {op_name!r}. {nearest(op_name, CATALOGUE)}")
    return spec
