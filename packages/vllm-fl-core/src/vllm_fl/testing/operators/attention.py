"""``attention_backend``: the class that it names, run as vLLM runs it.

Requests are served step by step through vLLM's own layer, metadata builder and paged cache, with
shuffled block tables, and every output is compared with a float64 oracle. The checks:

=============  ====================================================================================
contract       what the text names; latent attention is refused or done
values         head sizes, grouped heads, prefill, decode, mixed steps, cached prefixes, sliding
               windows whose passed blocks are given back, soft caps, sinks
chunks         one sequence cut in different ways
unused_nan     NaN in every cache slot that no token was written to
cache          no byte of the cache changes but in the slots of the tokens
padding        the same with rows of slot -1 at the end
offsets        cache blocks more than 2^31 elements from the start
canary         the output is not the mean of the values
determinism    two runs give the same bits
=============  ====================================================================================

A layer that the class refuses is reported with the class's reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.types import load_object
from vllm_fl.integration.versions import check_vllm
from vllm_fl.testing.case import Case, ConformanceFailure, NotApplicable, Subject
from vllm_fl.testing.compare import check_equal, check_values
from vllm_fl.testing.paged.engine import Engine
from vllm_fl.testing.paged.oracle import attend, mean_of_values
from vllm_fl.testing.paged.scenario import Layer, Scenario, Tokens, make_sinks, make_tokens
from vllm_fl.testing.tensors import FLOATS

OP = "attention_backend"
HEAD_SIZES = (16, 32, 64, 80, 96, 112, 128, 192, 256)
HEADS = ((4, 4), (6, 2), (5, 1), (8, 2))

Steps = list[dict[int, int]]
Plan = Callable[[int], Steps]
"""Block size -> the steps of a scenario."""


def _prefill(block: int) -> Steps:
    return [{0: 13, 1: 1, 2: block, 3: block + 1, 4: 2 * block + 5}]


def _decode(block: int) -> Steps:
    return [{0: max(block - 1, 1), 1: 3, 2: 2 * block}, *[{0: 1, 1: 1, 2: 1}] * 3]


def _mixed(block: int) -> Steps:
    """Decoding, continuing and starting requests in one step."""
    return [{0: block + 2, 1: 9}, {0: 1, 1: 6, 2: block + 3}, {0: 1, 1: 1, 2: 4, 3: 1}]


def _prefix(block: int) -> Steps:
    """Cached prefixes of 0, 1, a block and a block and one token."""
    return [{1: 1, 2: block, 3: block + 1}, {0: 5, 1: 5, 2: 5, 3: 5}]


def _chunks(size: int, block: int) -> Steps:
    """One request of 2 blocks and 5 tokens in chunks."""
    length = 2 * block + 5
    return [{0: min(size, length - done)} for done in range(0, length, size)]


PLANS: dict[str, Plan] = {
    "prefill": _prefill,
    "decode": _decode,
    "mixed": _mixed,
    "prefix": _prefix,
}


def _backend(subject: Subject) -> Any:
    decision = check_vllm()
    if not decision:
        raise NotApplicable("skipped", decision.reason)
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        raise NotApplicable("skipped", "vLLM finds no platform here; see `vllm-fl doctor`")
    subject.ask({"use_mla": False, "use_sparse": False})
    return load_object(subject.fn(use_mla=False, use_sparse=False))


class _Run:
    """A scenario that has been run."""

    def __init__(
        self,
        subject: Subject,
        layer: Layer,
        plan: Plan,
        *,
        garbage: float = 50.0,
        padding: int = 0,
        far: bool = False,
    ) -> None:
        self.sinks = make_sinks(layer)
        self.engine = Engine(_backend(subject), layer, self.sinks, subject.device)
        steps = plan(self.engine.block_size)
        self.scenario = Scenario(layer, steps, garbage, padding, far)
        self.tokens = make_tokens(self.scenario)
        self.outputs = self.engine.run(self.scenario, self.tokens)

    def each(self) -> Iterator[tuple[str, Tokens, int, int, Tensor]]:
        """Yield label, tokens, first and last position, and output of each request and step."""
        done = dict.fromkeys(self.tokens, 0)
        for index, step in enumerate(self.scenario.steps):
            for request, new in step.items():
                first = done[request]
                done[request] += new
                label = (
                    f"step {index + 1}, request {request} at positions {first}..{first + new - 1}"
                )
                yield label, self.tokens[request], first, first + new, self.outputs[index][request]

    def check(self) -> None:
        """Compare all outputs with the oracle."""
        layer = self.scenario.layer
        for label, tokens, first, last, output in self.each():
            expected = attend(layer, tokens, first, last, self.sinks)
            check_values(output, expected, get_spec(OP).tolerances, label)


def _values(layer: Layer, plan: Plan, subject: Subject) -> None:
    _Run(subject, layer, plan).check()


def _unused(layer: Layer, plan: Plan, subject: Subject) -> None:
    _Run(subject, layer, plan, garbage=torch.nan).check()


def _padding(layer: Layer, plan: Plan, subject: Subject) -> None:
    run = _Run(subject, layer, plan, padding=3)
    run.engine.check_cache()
    run.check()


def _cache(layer: Layer, plan: Plan, subject: Subject) -> None:
    run = _Run(subject, layer, plan)
    run.engine.check_cache()
    run.check()


def _offsets(layer: Layer, plan: Plan, subject: Subject) -> None:
    _Run(subject, layer, plan, far=True).check()


def _canary(layer: Layer, plan: Plan, subject: Subject) -> None:
    """Attention that ignores its scores returns the mean of the values, without any error."""
    for label, tokens, _, last, output in _Run(subject, layer, plan).each():
        mean = mean_of_values(layer, tokens, last - 1)
        if last > 1 and (output[-1].cpu().double() - mean).abs().max() < 0.05:
            raise ConformanceFailure(f"{label}: the output is the mean of the values")


def _determinism(layer: Layer, plan: Plan, subject: Subject) -> None:
    first, second = (_Run(subject, layer, plan) for _ in range(2))
    for one, other in zip(first.each(), second.each(), strict=True):
        check_equal(one[-1], other[-1], f"two runs, {one[0]}")


def _reference(subject: Subject) -> None:
    backend = _backend(subject)
    from vllm.v1.attention.backend import AttentionBackend

    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise ConformanceFailure(f"{backend!r} is not a subclass of vLLM's AttentionBackend")


def _latent(subject: Subject) -> None:
    """What is named for latent attention is latent attention, or refuses it."""
    _backend(subject)
    subject.ask({"use_mla": True, "use_sparse": False})
    backend = load_object(subject.fn(use_mla=True, use_sparse=False))
    refusal = backend.validate_configuration(
        head_size=576,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=64,
        use_mla=True,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=None,
        attn_type="decoder",
    )
    if not refusal and not backend.is_mla():
        raise ConformanceFailure("it accepts latent attention and is_mla() is False")


def _layers(dtype: torch.dtype) -> Iterator[tuple[Layer, tuple[str, ...]]]:
    """Yield layers, each with the plans that it is tried on."""
    base = Layer(dtype)
    yield base, tuple(PLANS)
    for size in HEAD_SIZES:
        if size != base.head_size:
            yield replace(base, head_size=size), ("mixed",)
    for heads, kv_heads in HEADS:
        yield replace(base, heads=heads, kv_heads=kv_heads), ("prefix", "decode")
    for window in (1, 4, 16, 19):
        yield replace(base, window=window), ("prefill", "decode", "prefix")
    yield replace(base, soft_cap=2.0), ("mixed", "decode")
    yield replace(base, sinks=True), ("mixed", "decode")
    yield replace(base, window=6, soft_cap=5.0), ("mixed",)
    yield replace(base, window=6, sinks=True), ("mixed",)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    yield Case(OP, "contract", "reference", _reference)
    yield Case(OP, "contract", "latent", _latent)

    def case(check: str, run: Any, layer: Layer, plan: str) -> Case:
        return Case(OP, check, f"{layer.name}-{plan}", partial(run, layer, PLANS[plan]))

    for dtype in FLOATS:
        base, windowed = Layer(dtype), Layer(dtype, window=6)
        for layer, plans in _layers(dtype):
            for plan in plans:
                yield case("values", _values, layer, plan)
        for size in (1, 7, 16, 64):
            run = partial(_values, base, partial(_chunks, size))
            yield Case(OP, "chunks", f"{base.name}-chunks_of_{size}", run)
        for layer in (base, windowed, replace(base, soft_cap=2.0), replace(base, sinks=True)):
            for plan in ("mixed", "decode"):
                yield case("unused_nan", _unused, layer, plan)
        for layer in (base, *(replace(base, head_size=size) for size in (46, 80))):
            yield case("cache", _cache, layer, "mixed")
            yield case("padding", _padding, layer, "decode")
            yield case("padding", _padding, layer, "mixed")
        if dtype != torch.float32:
            yield case("offsets", _offsets, base, "mixed")
        yield case("canary", _canary, base, "mixed")
        yield case("determinism", _determinism, base, "mixed")
