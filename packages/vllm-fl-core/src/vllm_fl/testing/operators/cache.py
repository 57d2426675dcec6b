"""``reshape_and_cache_flash``: every layout of the caches that vLLM has, and padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_fl.testing.case import Arguments, Case
from vllm_fl.testing.checks import Inputs, TensorOperator
from vllm_fl.testing.compare import Expected
from vllm_fl.testing.tensors import FAR, FLOATS, ROW_LAYOUTS, Maker, far_rows, short

BLOCKS = 7
LAYOUTS = ("nhd", "hnd", "nhd_packed", "hnd_packed", "separate", "skewed")


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Expected | None, ...]:
    """The oracle: one token after the other; every element of the caches is exact."""
    size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot != -1:
            key_cache[slot // size, slot % size] = key[token]
            value_cache[slot // size, slot % size] = value[token]
    expected = [
        Expected(cache.double(), cache.dtype, exact=torch.ones_like(cache, dtype=torch.bool))
        for cache in (key_cache, value_cache)
    ]
    return None, *expected


@dataclass(frozen=True)
class Form:
    """One call.

    Attributes:
        dtype: of everything but the slots.
        heads: key/value heads.
        sizes: channels of a key's and of a value's head.
        block_size: tokens in a block.
        tokens: tokens that have an entry in slot_mapping.
        more: rows of key and value beyond them.
        padding: every so many tokens there is one without a slot; 0 for none.
        layout: of the caches, see :meth:`caches`.
        source: layout of key and value, a name in ROW_LAYOUTS.
    """

    dtype: torch.dtype
    heads: int = 2
    sizes: tuple[int, int] = (64, 64)
    block_size: int = 16
    tokens: int = 21
    more: int = 0
    padding: int = 0
    layout: str = "nhd_packed"
    source: str = "packed"

    @property
    def name(self) -> str:
        """All of it, for the case's id."""
        return (
            f"{short(self.dtype)}-{self.tokens}+{self.more}x{self.heads}"
            f"x{self.sizes[0]}:{self.sizes[1]}-blocks_of_{self.block_size}"
            f"-pad{self.padding}-{self.layout}-{self.source}"
        )

    def caches(self, maker: Maker) -> tuple[Tensor, Tensor]:
        """Return key and value cache, as views ``[blocks, block_size, heads, size]``.

        Heads lie inside positions ("nhd") or outside ("hnd"); "packed" has the value of a token
        and head behind its key; "separate" has two halves of one tensor, first all keys; "skewed"
        has a gap after every dimension.
        """
        order = (self.heads, self.block_size) if "hnd" in self.layout else (
            self.block_size, self.heads
        )  # fmt: skip
        key_size, value_size = self.sizes
        if self.layout.endswith("packed"):
            whole = self._cache(maker, BLOCKS, *order, key_size + value_size)
            parts = whole.split(self.sizes, dim=-1)
            key, value = parts[0], parts[1]
        elif self.layout == "separate" and key_size == value_size:
            whole = self._cache(maker, 2, BLOCKS, *order, key_size)
            key, value = whole[0], whole[1]
        else:
            key, value = (self._cache(maker, BLOCKS, *order, size) for size in self.sizes)
        return (
            (key.transpose(1, 2), value.transpose(1, 2)) if "hnd" in self.layout else (key, value)
        )

    def _cache(self, maker: Maker, *shape: int) -> Tensor:
        layout = "skewed" if self.layout == "skewed" else "contiguous"
        return maker.place(maker.normal(*shape), self.dtype, layout)

    def slots(self, maker: Maker) -> Tensor:
        """Return the slots, shuffled; the first and the last slot of the cache among them."""
        count = BLOCKS * self.block_size
        order = (torch.arange(count) * 37 + count - 1) % count  # no block size has the factor 37
        slots = order[: self.tokens].clone()
        if self.tokens > 1:
            slots[1] = 0 if 0 not in slots else slots[1]
        if self.padding:
            slots[:: self.padding] = -1
        return slots

    def make(self, maker: Maker) -> Arguments:
        """Make the arguments."""
        rows = self.tokens + self.more
        key, value = (
            maker.place(maker.normal(rows, self.heads, size), self.dtype, self.source)
            for size in self.sizes
        )
        key_cache, value_cache = self.caches(maker)
        return {
            "key": key,
            "value": value,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "slot_mapping": maker.place(self.slots(maker)),
        }

    def make_far(self, maker: Maker) -> Arguments:
        """Make caches of two blocks that lie more than 2^31 elements apart."""
        made = replace(self, tokens=3).make(maker)
        for name in ("key_cache", "value_cache"):
            near = made[name][:2].contiguous().cpu()
            made[name] = far_rows(near, self.dtype, maker.device)
            assert made[name].stride(0) == FAR
        slots = torch.tensor([2 * self.block_size - 1, -1, 1])
        return {**made, "slot_mapping": maker.place(slots)}


def _forms() -> Iterator[Form]:
    for dtype in FLOATS:
        base = Form(dtype)
        for layout in LAYOUTS:
            yield replace(base, layout=layout, padding=4)
        for source in ROW_LAYOUTS:
            yield replace(base, source=source)
        for tokens in (0, 1, 2, 100):
            yield replace(base, tokens=tokens)
        for tokens in (1, 5):
            yield replace(base, tokens=tokens, padding=1)  # nothing but padding
        for padding, more in ((0, 5), (3, 0), (2, 11)):
            yield replace(base, padding=padding, more=more)
        for heads in (1, 3, 8, 40):
            yield replace(base, heads=heads, padding=5)
        for sizes in ((16, 16), (80, 80), (96, 96), (112, 112), (128, 128), (256, 256)):
            yield replace(base, sizes=sizes)
        for sizes in ((192, 128), (48, 64)):
            yield replace(base, sizes=sizes, layout="hnd_packed", padding=6)
        for block_size in (32, 48, 128, 528):
            yield replace(base, block_size=block_size, padding=7)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    probes = [Form(dtype, padding=4, more=2, layout="hnd_packed") for dtype in FLOATS]
    far = [Form(dtype) for dtype in FLOATS[1:]]
    yield from TensorOperator(
        "reshape_and_cache_flash",
        reshape_and_cache_flash,
        inputs=[Inputs(form.name, form.make) for form in dict.fromkeys(_forms())],
        probes=[Inputs(form.name, form.make) for form in probes],
        far=[Inputs(form.name, form.make_far) for form in far],
    ).cases()
