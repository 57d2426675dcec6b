"""One attention layer of vLLM, made of vLLM's own objects and run step by step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vllm_fl.testing.case import ConformanceFailure, NotApplicable, synchronize
from vllm_fl.testing.paged.blocks import Blocks
from vllm_fl.testing.paged.configuration import configure
from vllm_fl.testing.paged.scenario import Layer, Scenario, Tokens
from vllm_fl.testing.tensors import FAR, empty

PREFIX = "model.layers.0.self_attn.attn"


class Engine:
    """A layer, its cache and the requests that it serves.

    Args:
        backend: vLLM's ``AttentionBackend`` class.
        layer: the layer.
        sinks: one logit a head, used if the layer has sinks.
        device: torch's name of the device.

    Raises:
        NotApplicable: the backend refuses the layer; the reason is its own.
    """

    def __init__(self, backend: Any, layer: Layer, sinks: Tensor, device: str) -> None:
        self.backend = backend
        self.layer = layer
        self.device = device
        self.config = configure(backend, layer)
        with self._loading():
            self.attention = self._attention(sinks)
            self.spec = self.attention.get_kv_cache_spec(self.config)
        self.block_size: int = self.spec.block_size

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Set what vLLM sets while it loads a model: configuration, dtype and device."""
        from vllm.config import set_current_vllm_config

        before = torch.get_default_dtype()
        torch.set_default_dtype(self.layer.dtype)
        try:
            with set_current_vllm_config(self.config), torch.device(self.device):
                yield
        finally:
            torch.set_default_dtype(before)

    def _attention(self, sinks: Tensor) -> Any:
        from vllm.model_executor.layers.attention import Attention

        layer = self.layer
        extra = {"sinks": sinks.to(self.device, layer.dtype)} if layer.sinks else {}
        try:
            attention = Attention(
                layer.heads,
                layer.head_size,
                layer.scale,
                num_kv_heads=layer.kv_heads,
                cache_config=self.config.cache_config,
                logits_soft_cap=layer.soft_cap,
                per_layer_sliding_window=layer.window,
                prefix=PREFIX,
                attn_backend=self.backend,
                **extra,
            )
        except NotImplementedError as error:
            raise NotApplicable("refused", str(error)) from error
        attention.process_weights_after_loading(layer.dtype)
        return attention

    def run(self, scenario: Scenario, tokens: dict[int, Tokens]) -> list[dict[int, Tensor]]:
        """Serve the requests; return for each step, request -> output [new tokens, heads, size].

        Raises:
            ConformanceFailure: an input was overwritten.
            NotApplicable: there is not the memory for a far cache.
        """
        from vllm.config import set_current_vllm_config

        blocks = Blocks(scenario, self.block_size)
        with set_current_vllm_config(self.config):
            if scenario.far:
                self._allocate_far(blocks)
            else:
                self._allocate(blocks, scenario.garbage)
            builder = self.backend.get_builder_cls()(
                self.spec, [PREFIX], self.config, torch.device(self.device)
            )
            done = dict.fromkeys(tokens, 0)
            outputs = []
            for step in scenario.steps:
                outputs.append(self._step(step, done, tokens, blocks, scenario, builder))
                for request, new in step.items():
                    done[request] += new
        self.blocks = blocks
        return outputs

    def check_cache(self) -> None:
        """Check that the cache has changed in the slots of the tokens and nowhere else.

        Raises:
            ConformanceFailure: says in which block.
        """
        integer = {2: torch.int16, 4: torch.int32}[self.cache.element_size()]
        now, before = self.cache.cpu().view(integer), self.before.view(integer)
        per_block = (now != before).movedim(self.block_dim, 0).flatten(1).sum(dim=1)
        per_slot = 2 * self.layer.kv_heads * self.layer.head_size
        capacity = now.numel() // len(per_block)
        for block, changed in enumerate(per_block.tolist()):
            slots = self.blocks.used.get(block, 0)
            if not slots * per_slot <= changed <= slots * (capacity // self.block_size):
                raise ConformanceFailure(
                    f"cache block {block} has {slots} slots that were to be written, of "
                    f"{per_slot} elements each, but {changed} elements of it have changed"
                )

    def _allocate(self, blocks: Blocks, garbage: float) -> None:
        shape, order, self.block_dim = self._cache_form(blocks.count)
        physical = torch.full([shape[i] for i in order], garbage, dtype=self.layer.dtype)
        inverse = [order.index(i) for i in range(len(order))]
        self.before = physical.permute(inverse)
        self.cache = physical.to(self.device, copy=True).permute(inverse)
        self.attention.kv_cache = self.cache

    def _allocate_far(self, blocks: Blocks) -> None:
        """Make a cache whose last blocks are used; of a host's memory only their pages are."""
        one, _, _ = self._cache_form(1)
        # Twice, because keys and values may be in separate halves.
        blocks.shift(2 * FAR // math.prod(one))
        shape, order, self.block_dim = self._cache_form(blocks.count)
        inverse = [order.index(i) for i in range(len(order))]
        flat = empty(math.prod(shape), self.layer.dtype, self.device)
        self.cache = flat.view([shape[i] for i in order]).permute(inverse)
        self.attention.kv_cache = self.cache

    def _cache_form(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the cache's logical shape, its order in memory, and the dimension of blocks."""
        layer, backend = self.layer, self.backend
        if hasattr(backend, "supported_kv_cache_layouts"):  # vLLM 0.29 and newer
            from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

            layout = get_supported_kv_cache_layouts([backend])[0]
            self.config.cache_config.kv_cache_layout = layout.name
            width = self.spec.state_content_size_bytes // layer.dtype.itemsize
            shape = (count, self.spec.num_heads, self.block_size, width)
            return shape, layout.layer_view_order, 0
        sizes = (self.block_size, layer.kv_heads, layer.head_size)
        shape = backend.get_kv_cache_shape(count, *sizes, cache_dtype_str="auto")
        try:
            order = backend.get_kv_cache_stride_order()
        except (AttributeError, NotImplementedError):
            order = tuple(range(len(shape)))
        return shape, order, backend.get_kv_cache_block_dim(*sizes)

    def _step(
        self,
        step: dict[int, int],
        done: dict[int, int],
        tokens: dict[int, Tokens],
        blocks: Blocks,
        scenario: Scenario,
        builder: Any,
    ) -> dict[int, Tensor]:
        metadata, slots = self._metadata(step, done, blocks, scenario, builder)
        packed = self._packed(step, done, tokens, scenario.padding)
        before = packed.clone()
        query, key, value = self._split(packed)
        output = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
        impl, attention = self.attention.impl, self.attention
        if not self.backend.forward_includes_kv_cache_update:
            impl.do_kv_cache_update(attention, key, value, self.cache, slots)
        impl.forward(attention, query, key, value, self.cache, metadata, output=output)
        synchronize(self.device)
        if not torch.equal(packed, before):
            raise ConformanceFailure("query, key or value was overwritten")
        return dict(zip(step, output.split([*step.values(), scenario.padding]), strict=False))

    def _packed(
        self, step: dict[int, int], done: dict[int, int], tokens: dict[int, Tokens], padding: int
    ) -> Tensor:
        """Return the step's rows of query, key and value side by side, as a model's projection."""
        rows = [
            torch.cat([x[done[r] : done[r] + n].flatten(1) for x in tokens[r].parts], 1)
            for r, n in step.items()
        ]
        rows.append(torch.full((padding, rows[0].shape[1]), 3.0, dtype=self.layer.dtype))
        return torch.cat(rows).to(self.device)

    def _split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = self.layer
        widths = [heads * layer.head_size for heads in (layer.heads, *[layer.kv_heads] * 2)]
        query, key, value = packed.split(widths, dim=1)
        shape = (len(packed), -1, layer.head_size)
        return query.view(shape), key.view(shape), value.view(shape)

    def _metadata(
        self,
        step: dict[int, int],
        done: dict[int, int],
        blocks: Blocks,
        scenario: Scenario,
        builder: Any,
    ) -> tuple[Any, Tensor]:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        padding = scenario.padding
        new = [*step.values(), *[0] * padding]  # padding requests are empty, as in vLLM's graphs
        context = [*(done[request] for request in step), *[0] * padding]
        lengths = [a + b for a, b in zip(context, new, strict=True)]
        starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0).int()
        host = torch.tensor(lengths, dtype=torch.int32)
        pairs = [(r, p) for r, n in step.items() for p in range(done[r], done[r] + n)]
        slots = torch.tensor(
            [*(blocks.slot(r, p) for r, p in pairs), *[-1] * padding], device=self.device
        )
        table = blocks.table(step, done, self.layer.window, padding).to(self.device)
        given = {
            "query_start_loc": starts.to(self.device),
            "query_start_loc_cpu": starts,
            "seq_lens": host.to(self.device),
            "num_reqs": len(new),
            "num_actual_tokens": len(slots),
            "max_query_len": max(new),
            "max_seq_len": max(lengths),
            "block_table_tensor": table,
            "slot_mapping": slots,
            "causal": True,
            "positions": torch.tensor([p for _, p in pairs] + [0] * padding, device=self.device),
            "is_prefilling": torch.tensor([n > 1 for n in new]),
            "seq_lens_cpu_upper_bound": host,
            "_seq_lens_cpu": host,
            "_num_computed_tokens_cpu": torch.tensor(context, dtype=torch.int32),
        }
        known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
        common = CommonAttentionMetadata(**{k: v for k, v in given.items() if k in known})
        return builder.build(common_prefix_len=0, common_attn_metadata=common), slots
