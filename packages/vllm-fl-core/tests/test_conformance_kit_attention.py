"""The attention cases of the conformance kit, tried on a small backend with planted faults.

The backend is as plain as can be (one request, one head at a time, fp32) and differs from the
reference wheel's in what vLLM leaves open: keys and values in separate halves of the cache, and
written by a method of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kit_runs import found, implementation, run  # noqa: E402
from torch import Tensor  # noqa: E402
from vllm.v1.attention.backend import (  # noqa: E402
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
)

from vllm_fl.dispatch.types import Decision  # noqa: E402
from vllm_fl.testing.operators import attention  # noqa: E402


@dataclass
class PlainMetadata:
    starts: list[int]
    lengths: list[int]
    blocks: Tensor
    slots: Tensor


class PlainBuilder(AttentionMetadataBuilder[PlainMetadata]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        return PlainMetadata(
            common.query_start_loc.tolist(),
            common.seq_lens.tolist(),
            common.block_table_tensor.long(),
            common.slot_mapping,
        )


class PlainImpl(AttentionImpl[PlainMetadata]):
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None,
        sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder",
        kv_sharing_target_layer_name=None, sinks=None,
    ):  # fmt: skip
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.window, self.cap, self.sinks = (
            scale,
            sliding_window,
            logits_soft_cap,
            sinks,
        )
        self.kv_cache_dtype = kv_cache_dtype

    def kept(self, slots: Tensor) -> Tensor:
        return slots >= 0

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        rows = self.kept(slot_mapping)
        slots, size = slot_mapping[rows], kv_cache.shape[2]
        blocks = torch.div(slots, size, rounding_mode="floor")
        kv_cache[0, blocks, slots % size] = key[rows]
        kv_cache[1, blocks, slots % size] = value[rows]

    def gather(self, cache: Tensor, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [tokens, kv_heads, size] of the request's blocks."""
        used = blocks[: -(-length // cache.shape[2])]
        keys, values = cache[:, used].flatten(1, 2)
        return keys[:length].float(), values[:length].float()

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Query and key positions, broadcast -> whether the query sees the key."""
        seen = key <= query
        return seen if self.window is None else seen & (query - key < self.window)

    def kv_head(self, head: int) -> int:
        return head * self.num_kv_heads // self.num_heads

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        scores = query.float() @ keys.T * self.scale
        return scores if not self.cap else self.cap * torch.tanh(scores / self.cap)

    def weights(self, scores: Tensor, head: int) -> Tensor:
        if self.sinks is None:
            return torch.softmax(scores, 1)
        sink = self.sinks[head].float().expand(len(scores), 1)
        return torch.softmax(torch.cat((scores, sink), 1), 1)[:, :-1]

    def hidden_values(self, values: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen.any(0)[:, None], values, 0.0)

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output,
        output_scale=None, output_block_scale=None,
    ):  # fmt: skip
        meta = attn_metadata
        for row, length in enumerate(meta.lengths):
            begin, end = meta.starts[row], meta.starts[row + 1]
            if begin == end:
                continue
            keys, values = self.gather(kv_cache, meta.blocks[row], length)
            at = torch.arange(length - (end - begin), length)[:, None]
            seen = self.visible(at, torch.arange(length))
            for head in range(self.num_heads):
                other = self.kv_head(head)
                scores = self.scores(query[begin:end, head], keys[:, other])
                weights = self.weights(scores.masked_fill(~seen, -torch.inf), head)
                output[begin:end, head] = (
                    weights @ self.hidden_values(values[:, other], seen)
                ).to(output.dtype)  # fmt: skip
        return output


class PlainBackend(AttentionBackend):
    supported_dtypes = [torch.float32, torch.float16, torch.bfloat16]
    forward_includes_kv_cache_update = False
    impl = PlainImpl
    builder = PlainBuilder

    @staticmethod
    def get_name():
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls):
        return cls.impl

    @classmethod
    def get_builder_cls(cls):
        return cls.builder

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supports_sink(cls):
        return True

    @classmethod
    def supports_sliding_window(cls):
        return True


pytestmark = pytest.mark.skipif(
    hasattr(AttentionBackend, "supported_kv_cache_layouts"),
    reason="this vLLM has one cache shape, which the small backend does not have",
)


class Only64(PlainBackend):
    @classmethod
    def get_supported_head_sizes(cls):
        return [64]


class NoSoftCapImpl(PlainImpl):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.cap:
            raise NotImplementedError("no soft cap")


class NoSoftCap(PlainBackend):
    impl = NoSoftCapImpl


# -- faults: a method of the implementation or of the builder, done wrong


def long_window(self, query, key):
    seen = key <= query
    return seen if self.window is None else seen & (query - key <= self.window)


def short_window(self, query, key):
    seen = key <= query
    return seen if self.window is None else seen & (query - key < max(self.window - 1, 1))


def window_ignored(self, query, key):
    return key <= query


def mask_inverted(self, query, key):
    return key > query - 1  # the query itself, so that no row is empty, and what must be hidden


def future_seen(self, query, key):
    return (key >= 0) & (query >= 0)


def block_table_ignored(self, cache, blocks, length):
    return PlainImpl.gather(self, cache, torch.arange(1, len(blocks) + 1), length)


def last_block_ignored(self, cache, blocks, length):
    keys, values = PlainImpl.gather(self, cache, blocks, length)
    whole = length // cache.shape[2] * cache.shape[2]
    if 0 < whole < length:
        keys[whole:] = 0
    return keys, values


def offsets_in_32_bits(self, cache, blocks, length):
    return PlainImpl.gather(self, cache, blocks % (2**31 // cache[0, 0].numel()), length)


def heads_interleaved(self, head):
    return head % self.num_kv_heads


def cap_dropped(self, query, keys):
    return query.float() @ keys.T * self.scale


def scale_forgotten(self, query, keys):
    scores = query.float() @ keys.T * self.head_size**-0.5
    return scores if not self.cap else self.cap * torch.tanh(scores / self.cap)


def scale_after_cap(self, query, keys):
    scores = query.float() @ keys.T
    return self.scale * (scores if not self.cap else self.cap * torch.tanh(scores / self.cap))


def first_64_channels(self, query, keys):
    return PlainImpl.scores(self, query[:, :64], keys[:, :64])


def mean_of_values(self, query, keys):
    return torch.zeros(len(query), len(keys))


def sinks_dropped(self, scores, head):
    return torch.softmax(scores, 1)


def sink_of_another_head(self, scores, head):
    return PlainImpl.weights(self, scores, (head + 1) % self.num_heads)


def nan_leaks(self, values, seen):
    return values


def padding_written(self, slots):
    return slots >= -1


def neighbour_written(self, layer, key, value, kv_cache, slot_mapping):
    PlainImpl.do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping)
    kv_cache[0, -1, 0, 0, 0] = 1.0


def value_halved(self, layer, key, value, kv_cache, slot_mapping):
    """Only the first 64 channels are stored: a head size that is no power of two."""
    size = min(64, self.head_size)
    before = kv_cache.clone()
    PlainImpl.do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping)
    kv_cache[..., size:] = before[..., size:]


def query_overwritten(self, layer, query, key, value, cache, meta, output, *rest):
    PlainImpl.forward(self, layer, query, key, value, cache, meta, output)
    query.mul_(self.scale)
    return output


def not_deterministic(self, layer, query, key, value, cache, meta, output, *rest):
    PlainImpl.forward(self, layer, query, key, value, cache, meta, output)
    return output.mul_(1 + 1e-3 * torch.rand(output.shape))


def prefix_ignored(self, common_prefix_len, common_attn_metadata, fast_build=False):
    meta = PlainBuilder.build(self, 0, common_attn_metadata)
    meta.lengths = [b - a for a, b in zip(meta.starts, meta.starts[1:], strict=False)]
    return meta


FAULTS = [
    ("visible", long_window, "*/values/*window*"),
    ("visible", short_window, "*/values/*window*"),
    ("visible", window_ignored, "*/values/*window*"),
    ("visible", mask_inverted, "*/values/*-prefill"),
    ("visible", future_seen, "*/values/*-prefill"),
    ("gather", block_table_ignored, "*/values/*"),
    ("gather", last_block_ignored, "*/values/*-prefix"),
    ("gather", offsets_in_32_bits, "*/offsets/*"),
    ("build", prefix_ignored, "*/values/*-prefix"),
    ("build", prefix_ignored, "*/chunks/*"),
    ("kv_head", heads_interleaved, "*/values/*-8:2x64-*"),
    ("scores", cap_dropped, "*/values/*-cap*"),
    ("scores", scale_after_cap, "*/values/*-cap*"),
    ("scores", scale_forgotten, "*/values/*"),
    ("scores", first_64_channels, "*/values/*x80-*"),
    ("scores", mean_of_values, "*/canary/*"),
    ("weights", sinks_dropped, "*/values/*-sinks-*"),
    ("weights", sink_of_another_head, "*/values/*-sinks-*"),
    ("hidden_values", nan_leaks, "*/unused_nan/*window*"),
    ("kept", padding_written, "*/padding/*"),
    ("do_kv_cache_update", neighbour_written, "*/cache/*"),
    ("do_kv_cache_update", value_halved, "*/cache/*x80-*"),
    ("forward", query_overwritten, "*/values/*"),
    ("forward", not_deterministic, "*/determinism/*"),
]


def backend_with(method: str, fault: object) -> type[PlainBackend]:
    kind = "builder" if method == "build" else "impl"
    part = type("Faulty", (getattr(PlainBackend, kind),), {method: fault})
    return type("FaultyBackend", (PlainBackend,), {kind: part})


@pytest.fixture
def run_backend(monkeypatch) -> Callable[[type, str], dict[str, str]]:
    """Run the cases that match on a backend class."""

    def attention_backend(use_mla=False, use_sparse=False):
        return f"{__name__}:Planted"

    def run_it(backend: type, pattern: str) -> dict[str, str]:
        monkeypatch.setitem(globals(), "Planted", backend)
        return run(implementation("attention_backend", attention_backend), pattern)

    return run_it


def test_a_right_backend_of_another_form_passes(run_backend) -> None:
    ended = run_backend(PlainBackend, "*")
    assert set(ended.values()) == {"passed"}


@pytest.mark.parametrize(
    ("method", "fault", "pattern"),
    FAULTS,
    ids=[f"{fault.__name__}-{pattern.split('/')[1]}" for _, fault, pattern in FAULTS],
)
def test_a_planted_fault_is_found(run_backend, method: str, fault: object, pattern: str) -> None:
    ended = run_backend(backend_with(method, fault), pattern)
    assert found(ended), ended


def test_without_vllm_the_cases_are_skipped(run_backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "check_vllm", lambda: Decision.no("vLLM is not installed"))
    ended = run_backend(PlainBackend, "*")
    assert set(ended.values()) == {"skipped: vLLM is not installed"}


def test_what_the_class_refuses_is_reported(run_backend) -> None:
    ended = run_backend(Only64, "*/values/bfloat16-4:2x*")
    refused = {case for case, end in ended.items() if end == "refused: head_size not supported"}
    assert refused == {case for case in ended if "x64" not in case}
    assert refused
    ended = run_backend(NoSoftCap, "*/values/bfloat16-*cap*")
    assert set(ended.values()) == {"refused: no soft cap"}
