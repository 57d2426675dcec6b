"""The operator catalogue: one stub function an operator.

The stub's signature is the contract that every implementation must accept, its docstring the
documentation; tables, tests and signature checks are made from here. Shapes: T tokens, H heads,
D head size. "Donated" means that an implementation may overwrite the argument's storage (and
return it), so the caller must not read the argument afterwards.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch.errors import RegistrationError, UnknownOperatorError, nearest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OpSpec:
    """What is fixed about an operator.

    Attributes:
        name: the operator's name.
        signature: the parameters that every implementation must accept, with their defaults.
        doc: the contract in words.
        donated: parameters whose storage an implementation may overwrite.
        donated_when: the parameters are donated only in calls where this one is not None.
        tolerances: per dtype name, (rtol, atol) against a float64 oracle.
    """

    name: str
    signature: inspect.Signature
    doc: str
    donated: frozenset[str] = frozenset()
    donated_when: str | None = None
    tolerances: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The first line of the documentation."""
        return self.doc.splitlines()[0]

    @property
    def declaration(self) -> str:
        """Name, parameters and result as a line of Python."""
        plain = {
            name: p.replace(annotation=inspect.Parameter.empty)
            for name, p in self.signature.parameters.items()
        }
        parts = [
            str(plain[name]).replace("=", f": {p.annotation} = ", 1)
            if p.default is not p.empty
            else f"{name}: {p.annotation}"
            for name, p in self.signature.parameters.items()
        ]
        return f"{self.name}({', '.join(parts)}) -> {self.signature.return_annotation}"

    def donates(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments gives up the storage of any of them."""
        if not self.donated:
            return False
        bound = self.signature.bind(*args, **kwargs).arguments
        if self.donated_when is not None and bound.get(self.donated_when) is None:
            return False
        return any(bound.get(name) is not None for name in self.donated)

    def check(self, fn: Callable[..., Any], owner: str) -> None:
        """Check that ``fn`` can be called as this operator.

        Its positional parameters must have the operator's names, in order, with the operator's
        defaults (or any default where the operator has one); more parameters need defaults.
        ``*args`` takes the place of any parameters.

        Raises:
            RegistrationError: names ``owner`` (implementation and wheel) and both signatures.
        """
        try:
            given = inspect.signature(fn)
        except (TypeError, ValueError):
            return  # a compiled builtin without a signature: only a call can tell
        problem = _mismatch(self.signature, given)
        if problem:
            raise RegistrationError(
                f"{owner} does not fit operator {self.name!r}: {problem}. "
                f"Operator: {self.declaration}; implementation: {given}."
            )


def _mismatch(spec: inspect.Signature, given: inspect.Signature) -> str:
    """Say why a function with signature ``given`` cannot stand in for ``spec``; "" if it can."""
    kinds = inspect.Parameter
    positional = [
        p for p in given.parameters.values()
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    variadic = any(p.kind is kinds.VAR_POSITIONAL for p in given.parameters.values())
    wanted = list(spec.parameters.values())
    for index, want in enumerate(wanted):
        if index >= len(positional):
            if variadic:
                break
            return f"parameter {want.name!r} is missing"
        have = positional[index]
        if have.kind is kinds.POSITIONAL_OR_KEYWORD and have.name != want.name:
            return f"parameter {index + 1} is {have.name!r}, not {want.name!r}"
        if want.default is not kinds.empty and have.default is kinds.empty:
            return f"parameter {want.name!r} has no default (the operator's is {want.default!r})"
        if want.default is not kinds.empty and have.default != want.default:
            return (
                f"parameter {want.name!r} defaults to {have.default!r}, "
                f"the operator's default is {want.default!r}"
            )
    extra = positional[len(wanted) :]
    extra += [p for p in given.parameters.values() if p.kind is kinds.KEYWORD_ONLY]
    for parameter in extra:
        if parameter.default is kinds.empty:
            return f"it requires a parameter {parameter.name!r} that the operator does not have"
    return ""


# vLLM's own tolerances (vllm/ir/tolerances.py): float16 widened for one rounding more.
_FLOAT_TOLERANCES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"float32": (1.3e-6, 1e-5), "float16": (2e-3, 1e-3), "bfloat16": (1.6e-2, 1e-3)}
)
_SPECS: dict[str, OpSpec] = {}


def _operator(
    *, donated: tuple[str, ...] = (), donated_when: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def declare(stub: Callable[..., Any]) -> Callable[..., Any]:
        name = stub.__name__
        _SPECS[name] = OpSpec(
            name=name,
            signature=inspect.signature(stub),
            doc=inspect.cleandoc(stub.__doc__ or ""),
            donated=frozenset(donated),
            donated_when=donated_when,
            tolerances=_FLOAT_TOLERANCES,
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


@_operator()
def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """The attention backend class for vLLM, as the text "package.module:Class".

    Called once a layer group when the model is built; the class is a subclass of vLLM's
    ``AttentionBackend`` whose ``validate_configuration`` refuses, with reasons, what it cannot do.
    Source: vLLM ``Platform.get_attn_backend_cls``.
    """


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
