"""Attention over a paged cache, decoding, prefilling and both at once, and the write into it.

The cache is vLLM's own: blocks of 16 tokens, heads inside tokens, the value of a head behind its
key ("NHD"), the same for every candidate; the names that end in ``_hnd`` have heads outside tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.candidates import vllm
from benchmarks.kernels.operator import OURS, Call, Inputs, Operator, Shape, Sweep, random
from vllm_fl_flaggems import tiles
from vllm_fl_flaggems.attention.planning import Mathematics, Step, attend
from vllm_fl_flaggems.kernels.attention_decode import decode
from vllm_fl_flaggems.kernels.attention_prefill import prefill
from vllm_fl_flaggems.kernels.cache import reshape_and_cache
from vllm_fl_flaggems.ops.cache import reshape_and_cache_flash

HEAD = 128
BLOCK = 16
SCALE = HEAD**-0.5
LONGEST = 40960  # tokens that a request may have
MOST_SPLITS = 32  # vLLM's flash_attn_max_num_splits_for_cuda_graph

Requests = Sequence[tuple[int, int]]
"""For each request, its tokens in the cache and how many of them are new."""


@dataclass(frozen=True)
class Batch:
    """A step, as the host knows it.

    Attributes:
        step: what ours takes.
        most: query tokens of the longest query.
        longest: tokens of the longest request.
        schedule: FlashAttention 3's scheduler metadata by number of splits, made once a step as
            vLLM does; empty where FlashAttention is missing.
    """

    step: Step
    most: int
    longest: int
    schedule: dict[int, Tensor]


def schedules(batch: Step, most: int, longest: int, heads: int, kv_heads: int) -> dict[int, Tensor]:
    """Return FlashAttention 3's scheduler metadata, with its own number of splits and vLLM's."""
    try:
        interface: Any = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    except ImportError:
        return {}
    if not hasattr(torch.ops._vllm_fa3_C, "get_scheduler_metadata"):
        return {}
    return {
        splits: interface.get_scheduler_metadata(
            batch_size=batch.lengths.shape[0],
            max_seqlen_q=most,
            max_seqlen_k=longest,
            num_heads_q=heads,
            num_heads_kv=kv_heads,
            headdim=HEAD,
            cache_seqlens=batch.lengths,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=batch.query_start,
            page_size=BLOCK,
            causal=True,
            window_size=(-1, -1),
            num_splits=splits,
        )
        for splits in (0, MOST_SPLITS)
    }


def attention_inputs(
    requests_of: Callable[[Shape], Requests], hnd: bool, shape: Shape, device: str, seed: int
) -> Inputs:
    """Return query, key cache, value cache and batch; the cache's blocks are shuffled."""
    requests = requests_of(shape)
    heads, kv_heads = shape[-2:]
    columns = [-(-length // BLOCK) for length, _ in requests]
    blocks = sum(columns)
    inner = (kv_heads, BLOCK) if hnd else (BLOCK, kv_heads)
    cache = random((blocks, *inner, 2 * HEAD), device, seed)
    keys, values = (cache.transpose(1, 2) if hnd else cache).split(HEAD, dim=-1)
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.randperm(blocks, generator=generator, device=device).int()
    table = torch.zeros((len(requests), max(columns)), dtype=torch.int32, device=device)
    first = 0
    for row, count in enumerate(columns):
        table[row, :count] = order[first : first + count]
        first += count
    counts = [new for _, new in requests]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    step = Step(
        tokens=sum(counts),
        query_start=starts.to(device),
        lengths=torch.tensor([length for length, _ in requests], dtype=torch.int32, device=device),
        table=table,
        causal=True,
        queries=(min(counts), max(counts)),
        longest=LONGEST,
    )
    most, longest = max(counts), max(length for length, _ in requests)
    batch = Batch(step, most, longest, schedules(step, most, longest, heads, kv_heads))
    return random((sum(counts), heads, HEAD), device, seed + 1), keys, values, batch


def attention_oracle(query: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Tensor:
    """Return the result in float64, one request and key/value head at a time."""
    out = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    starts, lengths = batch.step.query_start.tolist(), batch.step.lengths.tolist()
    group = query.shape[1] // keys.shape[2]
    for request, length in enumerate(lengths):
        rows = slice(starts[request], starts[request + 1])
        count = rows.stop - rows.start
        blocks = batch.step.table[request, : -(-length // BLOCK)].long()
        position = torch.arange(length - count, length, device=query.device)
        hidden = torch.arange(length, device=query.device) > position[:, None]
        for kv_head in range(keys.shape[2]):
            key = keys[blocks, :, kv_head].flatten(0, 1)[:length].double()
            value = values[blocks, :, kv_head].flatten(0, 1)[:length].double()
            for head in range(kv_head * group, (kv_head + 1) * group):
                scores = query[rows, head].double() @ key.t() * SCALE
                weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
                out[rows, head] = weights @ value
    return out


def attention_ours(query: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Tensor:
    """Call our kernels as the backend does."""
    out = torch.empty_like(query)
    attend(out, query, keys, values, batch.step, Mathematics(SCALE))
    return out


def attention_flash(splits: int) -> Callable[[], Call]:
    """Call FlashAttention 3 as vLLM's backend does; 0 splits: as many as it chooses itself."""

    def load() -> Call:
        interface: Any = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")

        def call(query: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Tensor:
            out = torch.empty_like(query)
            interface.flash_attn_varlen_func(
                q=query,
                k=keys,
                v=values,
                out=out,
                cu_seqlens_q=batch.step.query_start,
                max_seqlen_q=batch.most,
                seqused_k=batch.step.lengths,
                max_seqlen_k=batch.longest,
                softmax_scale=SCALE,
                causal=True,
                window_size=[-1, -1],
                block_table=batch.step.table,
                softcap=0.0,
                scheduler_metadata=batch.schedule[splits],
                fa_version=3,
                num_splits=splits,
            )
            return out

        return call

    return load


def attention_triton() -> Call:
    """Call vLLM's Triton attention as its backend does."""
    module: Any = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
    segments = 16
    buffers: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    ones = torch.ones(1, device="cuda")

    def call(query: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Tensor:
        heads, kv_heads = query.shape[1], keys.shape[2]
        threshold = 128 // kv_heads
        if (heads, kv_heads) not in buffers:
            shape = (threshold, heads, segments)
            kept = [(*shape, HEAD), shape, shape]
            buffers[heads, kv_heads] = tuple(
                torch.empty(size, dtype=torch.float32, device=query.device) for size in kept
            )
        output, maximum, total = buffers[heads, kv_heads]
        one = ones.expand(len(batch.step.lengths), kv_heads)
        out = torch.empty_like(query)
        module.unified_attention(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=batch.step.query_start,
            max_seqlen_q=batch.most,
            seqused_k=batch.step.lengths,
            max_seqlen_k=batch.longest,
            softmax_scale=SCALE,
            causal=True,
            window_size=(-1, -1),
            block_table=batch.step.table,
            softcap=0,
            q_descale=None,
            k_descale=one,
            v_descale=one,
            seq_threshold_3D=threshold,
            num_par_softmax_segments=segments,
            softmax_segm_output=output,
            softmax_segm_max=maximum,
            softmax_segm_expsum=total,
        )
        return out

    return call


def attention_traffic(requests_of: Callable[[Shape], Requests], shape: Shape) -> float:
    """Return the bytes of the cached keys and values, the queries and the results."""
    heads, kv_heads = shape[-2:]
    requests = requests_of(shape)
    cached = sum(length for length, _ in requests) * kv_heads
    return 4 * HEAD * (cached + sum(new for _, new in requests) * heads)


def attention_flops(requests_of: Callable[[Shape], Requests], shape: Shape) -> float:
    """Return the operations of both products over the keys that a query sees."""
    pairs = sum(new * length - new * (new - 1) // 2 for length, new in requests_of(shape))
    return 4 * HEAD * shape[-2] * pairs


def attention(
    shapes: Sequence[Shape],
    requests_of: Callable[[Shape], Requests],
    sweep: Sweep | None,
    hnd: bool = False,
) -> Operator:
    """Return attention of the requests that a shape stands for."""
    return Operator(
        shapes=shapes,
        make=partial(attention_inputs, requests_of, hnd),
        oracle=attention_oracle,
        traffic=partial(attention_traffic, requests_of),
        candidates={
            OURS: lambda: attention_ours,
            "flash3": attention_flash(0),
            "flash3_32": attention_flash(MOST_SPLITS),
            "vllm_triton": attention_triton,
        },
        flops=partial(attention_flops, requests_of),
        in_mean=False,
        sweep=sweep,
    )


def decoding(shape: Shape) -> Requests:
    """Return requests of one new token: (requests, shortest, longest, heads, kv_heads)."""
    requests, shortest, longest = shape[:3]
    steps = max(requests - 1, 1)
    return [(shortest + (longest - shortest) * i // steps, 1) for i in range(requests)]


def prefilling(shape: Shape) -> Requests:
    """Return requests without a history: (requests, tokens, heads, kv_heads)."""
    return [(shape[1], shape[1])] * shape[0]


def mixing(shape: Shape) -> Requests:
    """Return decodes and a chunk of a prompt: (decodes, context, chunk, heads, kv_heads)."""
    return [(shape[1], 1)] * shape[0] + [(shape[1] + shape[2], shape[2])]


def decode_launch(
    query: Tensor, keys: Tensor, values: Tensor, batch: Batch, tile: tiles.DecodeTile
) -> Tensor:
    """Launch the kernel for few queries with a given tile."""
    out, step = torch.empty_like(query), batch.step
    decode(
        out, query, keys, values, step.table, step.query_start, step.lengths, scale=SCALE,
        causal=True, window=None, cap=None, sinks=None, slopes=None, tile=tile,
    )  # fmt: skip
    return out


def prefill_launch(
    query: Tensor, keys: Tensor, values: Tensor, batch: Batch, tile: tiles.AttentionTile
) -> Tensor:
    """Launch the kernel for many queries with a given tile."""
    out, step = torch.empty_like(query), batch.step
    prefill(
        out, query, keys, values, step.table, step.query_start, step.lengths, scale=SCALE,
        shorter=0, most=batch.most, causal=True, window=None, cap=None, sinks=None, slopes=None,
        tile=tile,
    )  # fmt: skip
    return out


def group_of(shape: Shape) -> int:
    """Return the query heads of a key/value head."""
    return shape[-2] // shape[-1]


DECODE_SWEEP = Sweep(
    tile=lambda s: tiles.decode_tile(HEAD, 2, group_of(s), s[0] * s[-1], LONGEST),
    rivals=lambda s: tiles.decode_rivals(HEAD, group_of(s)),
    launch=decode_launch,
)
PREFILL_SWEEP = Sweep(
    tile=lambda s: tiles.prefill_tile(HEAD, 2, s[1] * group_of(s)),
    rivals=lambda s: tiles.prefill_rivals(HEAD),
    launch=prefill_launch,
)
DECODES = [
    (64, 4096, 4096, 32, 8),
    (128, 500, 640, 16, 8),
    (1, 128, 128, 32, 8),
    (1, 1024, 1024, 32, 8),
    (1, 4096, 4096, 32, 8),
    (1, 32768, 32768, 32, 8),
    (16, 2048, 2048, 32, 8),
    (256, 100, 1500, 32, 8),
]
PREFILLS = [(1, 8192, 32, 8), (4, 4096, 32, 8), (16, 1024, 32, 8)]


def cache_inputs(shape: Shape, device: str, seed: int) -> Inputs:
    """Return key and value as slices of a packed projection, both caches, and shuffled slots."""
    tokens, kv_heads = shape
    packed = random((tokens, 6 * kv_heads * HEAD), device, seed)
    width = kv_heads * HEAD
    key, value = packed[:, 4 * width :].split(width, dim=-1)
    blocks = -(-2 * tokens // BLOCK)
    cache = random((blocks, BLOCK, kv_heads, 2 * HEAD), device, seed + 1)
    generator = torch.Generator(device).manual_seed(seed)
    slots = torch.randperm(blocks * BLOCK, generator=generator, device=device)[:tokens]
    heads = (tokens, kv_heads, HEAD)
    return key.view(heads), value.view(heads), *cache.split(HEAD, dim=-1), slots


def cache_oracle(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the caches with the tokens in their slots."""
    expected = key_cache.double(), value_cache.double()
    for cache, new in zip(expected, (key, value), strict=True):
        cache[slots // BLOCK, slots % BLOCK] = new.double()
    return expected


def cache_agree(returned: Any, expected: Any) -> tuple[float, bool]:
    """Compare the caches, which must be equal."""
    pairs = list(zip(returned, expected, strict=True))
    worst = max(float((one.double() - other).abs().max()) for one, other in pairs)
    return worst, worst == 0


def cache_ours(*call: Tensor) -> Any:
    """Call our operator."""
    reshape_and_cache_flash(*call)
    return call[2:4]


def cache_vllm() -> Call:
    """Call vLLM's CUDA kernel."""
    one = torch.ones(1, device="cuda")

    def call(*arguments: Tensor) -> Any:
        torch.ops._C_cache_ops.reshape_and_cache_flash(*arguments, "auto", one, one)
        return arguments[2:4]

    return vllm(call)()


def cache_launch(*arguments: Tensor, tile: tiles.CacheTile) -> Any:
    """Launch our kernel with a given tile."""
    reshape_and_cache(*arguments, tile)
    return arguments[2:4]


OPERATORS = {
    "attention_decode": attention(DECODES, decoding, DECODE_SWEEP),
    "attention_decode_hnd": attention(DECODES[:3], decoding, DECODE_SWEEP, hnd=True),
    "attention_prefill": attention(PREFILLS, prefilling, PREFILL_SWEEP),
    "attention_prefill_hnd": attention(PREFILLS, prefilling, PREFILL_SWEEP, hnd=True),
    "attention_mixed": attention([(32, 2048, 2048, 32, 8), (128, 600, 512, 16, 8)], mixing, None),
    "reshape_and_cache_flash": Operator(
        shapes=[(1, 8), (64, 8), (2048, 8), (8192, 8)],
        make=cache_inputs,
        oracle=cache_oracle,
        traffic=lambda shape: 8 * shape[0] * shape[1] * HEAD,
        candidates={
            OURS: lambda: cache_ours,
            "vllm": cache_vllm,
        },
        agree=cache_agree,
        sweep=Sweep(
            tile=lambda shape: tiles.cache_tile(shape[1], HEAD),
            rivals=lambda shape: tiles.cache_rivals(shape[1], HEAD),
            launch=cache_launch,
        ),
    ),
}
