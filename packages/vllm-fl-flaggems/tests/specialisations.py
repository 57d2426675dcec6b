"""A job: the variants that Triton would compile for steps of 1 to 8192 tokens, as a line of JSON.

The kernels are not launched: each launch is turned into the key that Triton compiles for. The
driver is a stand-in for an H200's.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from vllm_fl.dispatch.backend import ExpertsShape
from vllm_fl.integration.warmup import missing_counts
from vllm_fl_flaggems.backend import FlagGemsBackend

MOST = 8192
SHARED = {"max_shared_mem": 227 * 1024}
keys: set[Any] = set()
_binders: dict[Any, Callable[..., Any]] = {}


def record(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
    """Stand in for the launch of a kernel."""
    if self not in _binders:
        _binders[self] = self.create_binder()[-1]
    _, specialization, options = _binders[self](*args, **kwargs)
    keys.add((self.fn.__name__, tuple(specialization), str(options)))


triton.runtime.driver.set_active(
    types.SimpleNamespace(
        get_current_target=lambda: triton.backends.compiler.GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        utils=types.SimpleNamespace(get_device_properties=lambda device: SHARED),
    )
)
JITFunction.run = record

from vllm_fl_flaggems.attention.planning import (  # noqa: E402
    ANY_LENGTH,
    Mathematics,
    Step,
    attend,
    compile_variants,
)
from vllm_fl_flaggems.ops import (  # noqa: E402
    activation,
    align,
    cache,
    experts,
    moe_sum,
    norm,
    rotary,
    routing,
)

# What runs there is chosen by the policy; here it is ours.
experts.shared_op = lambda name: vars({"moe_sum": moe_sum}.get(name, align))[name]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


WEIGHT = empty(4096)
TABLE = empty(40960, 128)
COS, SIN = TABLE.chunk(2, dim=-1)


def rotate(tokens: int, packed: int, query: int, key: int) -> None:
    """Rotate slices of a packed projection."""
    both = empty(tokens, packed * 128)
    q, k = both[:, : query * 128], both[:, query * 128 : (query + key) * 128]
    positions = empty(tokens, dtype=torch.int64)
    rotary.rotary_embedding(
        q.view(tokens, query, 128), k.view(tokens, key, 128), COS, SIN, positions, True
    )


class Experts:
    """Routing and experts of a layer."""

    def __init__(self, shape: ExpertsShape) -> None:
        self.shape = s = shape
        self.w1, self.w2 = empty(s.local, 2 * s.inner, s.hidden), empty(s.local, s.hidden, s.inner)
        self.bias = empty(s.routed, dtype=torch.float32)
        self.map = None if s.local == s.experts else empty(s.experts, dtype=torch.int32)

    def __call__(self, tokens: int) -> None:
        """Run a step of so many tokens on each rank."""
        s = self.shape
        tokens *= s.ranks
        scores = empty(tokens, s.routed)
        if s.groups > 1:
            weights, ids = routing.grouped_topk(
                scores, s.groups, s.groups // 2, s.k, True, 1.0, self.bias, 1
            )
        else:
            weights = empty(tokens, s.k, dtype=torch.float32)
            ids, places = (empty(tokens, s.k, dtype=torch.int32) for _ in range(2))
            routing.topk_softmax(weights, ids, places, scores, True)
        experts.fused_experts(
            empty(tokens, s.hidden), self.w1, self.w2, weights, ids, global_num_experts=s.experts,
            expert_map=self.map,
        )  # fmt: skip


DENSE: dict[str, Callable[[int], object]] = {
    "silu": lambda t: activation.silu_and_mul(empty(t, 2 * 12288)),
    "silu, narrow": lambda t: activation.silu_and_mul(empty(t, 2 * 96)),
    "gelu": lambda t: activation.gelu_and_mul(empty(t, 2 * 1000), "tanh"),
    "norm": lambda t: norm.rms_norm(empty(t, 4096), None, WEIGHT, 1e-6),
    "add norm": lambda t: norm.rms_norm(empty(t, 4096), empty(t, 4096), WEIGHT, 1e-6),
    "head norm": lambda t: norm.rms_norm(
        empty(t, 48 * 128)[:, :4096].view(t, 32, 128), None, WEIGHT[:128], 1e-6
    ),
    "rotary": lambda t: rotate(t, 48, 32, 8),
    "rotary, few heads": lambda t: rotate(t, 3, 1, 1),
}
EXPERTS = {
    "Qwen3-30B-A3B": ExpertsShape(8, 128, 1, 128, 128, 2048, 768, 2),
    "Mixtral-8x7B": ExpertsShape(2, 8, 1, 8, 8, 4096, 14336, 2),
    "Mixtral-8x7B, half of its experts": ExpertsShape(2, 8, 1, 8, 4, 4096, 14336, 2),
    "DeepSeek-V3 on 8 ranks of data": ExpertsShape(8, 256, 8, 256, 32, 7168, 2048, 2, ranks=8),
    "small and odd": ExpertsShape(3, 7, 1, 7, 7, 96, 40, 2),
}
BLOCK = 16


class Attention:
    """Attention and cache of a layer."""

    def __init__(self, heads: int, kv_heads: int, size: int, longest: int) -> None:
        self.heads, self.kv_heads, self.size, self.longest = heads, kv_heads, size, longest
        pages = empty(100, kv_heads, BLOCK, 2 * size).transpose(1, 2)
        self.cache = (pages[..., :size], pages[..., size:])
        self.layer = Mathematics(size**-0.5)

    def step(
        self,
        tokens: int,
        requests: int,
        queries: tuple[int, int],
        columns: int = 16,
        begin: int = 1,
    ) -> Step:
        """Describe a step, with slices of larger buffers that begin anywhere."""
        # Not "meta": tensors there have no address.
        numbers = torch.empty(requests * columns + 4, dtype=torch.int32)[begin:]
        return Step(
            tokens=tokens,
            query_start=numbers[: requests + 1],
            lengths=numbers[:requests],
            table=numbers[: requests * columns].view(requests, columns),
            causal=True,
            queries=queries,
            longest=self.longest,
        )

    def warm_up(self, requests: int, tokens: int) -> None:
        """Do what the implementation does for a layer before it serves."""
        query = empty(1, self.heads, self.size)
        new = query[:, : self.kv_heads]
        cache.reshape_and_cache_flash(new, new, *self.cache, empty(1, dtype=torch.int64))
        step = self.step(1, 1, (1, 1), begin=0)
        compile_variants(
            empty(*query.shape), query, *self.cache, step, self.layer, requests, tokens
        )

    def __call__(self, step: Step) -> None:
        """Run a step, with slices of a packed projection."""
        packed = empty(step.tokens, self.heads + 2 * self.kv_heads, self.size)
        query, *new = packed.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        slots = empty(step.tokens, dtype=torch.int64)
        cache.reshape_and_cache_flash(*new, *self.cache, slots)
        attend(empty(*query.shape), query, *self.cache, step, self.layer)


def decodes(layer: Attention, requests: int = 256) -> Iterable[Step]:
    """Yield steps of pure decode."""
    return (layer.step(n, n, (1, 1), columns=n) for n in range(1, requests + 1))


def others(layer: Attention) -> Iterable[Step]:
    """Yield steps of prefill and mixed steps, of any length."""
    for tokens in (*range(2, 600), *range(600, MOST, 97), MOST):
        yield layer.step(tokens, 1, (tokens, tokens))
        yield layer.step(tokens, 2, (1, tokens - 1))
        yield layer.step(tokens, min(tokens, 256), (1, -(-tokens // 256)), columns=64)
        yield layer.step(tokens, min(tokens, 256), ANY_LENGTH)


ATTENTION = {
    f"attention {heads}/{kv_heads} of {size}, {longest} tokens": (heads, kv_heads, size, longest)
    for heads, kv_heads, size, longest in (
        (8, 8, 64, 40960), (32, 8, 128, 40960), (64, 8, 128, 8192), (16, 8, 256, 40960),
        (4, 1, 64, 100), (128, 1, 128, 40960),
    )
}  # fmt: skip


def main() -> None:
    """Print name -> how many variants are warm, how many runs core adds, and what is late."""
    report = {}

    def late(name: str, warm_up: Callable[[], object], serve: Callable[[], object]) -> None:
        keys.clear()
        runs = warm_up()
        warm = set(keys)
        serve()
        compiled = sorted({key[0] for key in keys - warm})
        report[name] = {"warm": len(warm), "late": compiled, "runs": runs}

    def layer(
        name: str,
        run: Callable[[int], object],
        shapes: Sequence[ExpertsShape] = (),
        captured: Sequence[int] = (),
    ) -> None:
        """Run the counts that vLLM runs, those that core adds, and then all."""
        done = {*captured, MOST}
        counts = missing_counts(FlagGemsBackend().warmup_tokens(MOST, shapes), done)

        def warm_up() -> int:
            for count in (*done, *counts):
                run(count)
            return len(counts)

        late(name, warm_up, lambda: [run(count) for count in range(1, MOST + 1)])

    for name, run in DENSE.items():
        layer(name, run)
    for name, shape in EXPERTS.items():
        layer(name, Experts(shape), [shape])
    shape = EXPERTS["Qwen3-30B-A3B"]
    layer("with graphs", Experts(shape), [shape], [1, 2, 4, *range(8, 513, 8)])
    for name, sizes in ATTENTION.items():
        attention = Attention(*sizes)
        for phase, tokens, steps in (
            ("decode", 1, decodes(attention)),
            ("all", MOST, (*decodes(attention), *others(attention))),
        ):
            late(
                f"{name}, {phase}",
                partial(attention.warm_up, 256, tokens),
                partial(list, map(attention, steps)),
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
