"""``rotary_embedding``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vllm_fl.testing.case import Arguments, Case
from vllm_fl.testing.checks import Inputs, TensorOperator
from vllm_fl.testing.compare import Expected
from vllm_fl.testing.tensors import FLOATS, ROW_LAYOUTS, Maker, far_rows, short


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, neox: bool) -> Expected:
    """Rotate the channel pairs of ``x`` [T, H, D] in float64."""
    half = cos.shape[1]
    pair = torch.arange(half)
    one, two = (pair, pair + half) if neox else (2 * pair, 2 * pair + 1)
    c, s = cos[positions, None].double(), sin[positions, None].double()
    value, scale = x.double(), x.double()
    a, b = value[..., one], value[..., two]
    value[..., one], value[..., two] = a * c - b * s, b * c + a * s
    scale[..., one] = (a * c).abs() + (b * s).abs()
    scale[..., two] = (b * c).abs() + (a * s).abs()
    exact = torch.ones(x.shape, dtype=torch.bool)
    exact[..., : 2 * half] = False
    return Expected(value, x.dtype, scale, exact=exact)


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    is_neox_style: bool,
) -> tuple[Expected | None, ...]:
    """The oracle."""
    return tuple(
        None if x is None else rotate(x, cos, sin, position_ids, is_neox_style)
        for x in (query, key)
    )


@dataclass(frozen=True)
class Form:
    """One call.

    Attributes:
        dtype: of query and key.
        neox: the style.
        tokens: how many.
        heads: of query and key; no key heads for no key.
        size: of a head.
        rotary: how many channels are rotated.
        layout: of query and key.
        positions: "shuffled", "long" or "same".
        table: "own" tables of the inputs' dtype, "halves" of one cache of that dtype, or "float32".
    """

    dtype: torch.dtype
    neox: bool
    tokens: int = 5
    heads: tuple[int, int] = (4, 2)
    size: int = 64
    rotary: int = 64
    layout: str = "contiguous"
    positions: str = "shuffled"
    table: str = "halves"

    @property
    def name(self) -> str:
        """All of it."""
        return (
            f"{short(self.dtype)}-{'neox' if self.neox else 'pairs'}-{self.tokens}x"
            f"{self.heads[0]}+{self.heads[1]}x{self.size}-rotary{self.rotary}-{self.layout}-"
            f"{self.positions}-{self.table}"
        )

    def make(self, maker: Maker) -> Arguments:
        """Make the arguments."""
        tokens, (heads, key_heads) = self.tokens, self.heads
        query = maker.place(maker.normal(tokens, heads, self.size), self.dtype, self.layout)
        key = None
        if key_heads:
            key = maker.place(maker.normal(tokens, key_heads, self.size), self.dtype, self.layout)
        cos, sin, positions = self.angles(maker)
        return arguments(query, key, cos, sin, positions, self.neox)

    def angles(self, maker: Maker) -> tuple[Tensor, Tensor, Tensor]:
        """Make cos, sin and the positions."""
        length = 131072 if self.positions == "long" else 64
        half = self.rotary // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
        angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
        cos, sin = angle.cos().float(), angle.sin().float()
        positions = {
            "shuffled": maker.integers(self.tokens, high=length),
            "long": length - 1 - maker.integers(self.tokens, high=1000),
            "same": torch.full((self.tokens,), 7),
        }[self.positions]
        placed = maker.place(positions, layout="offset")
        if self.table == "halves":
            cache = maker.place(torch.cat((cos, sin), dim=1), self.dtype)
            return *cache.chunk(2, dim=1), placed
        dtype = torch.float32 if self.table == "float32" else self.dtype
        return maker.place(cos, dtype), maker.place(sin, dtype), placed


def arguments(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor, neox: bool
) -> Arguments:
    """Name the arguments."""
    return {
        "query": query,
        "key": key,
        "cos": cos,
        "sin": sin,
        "position_ids": positions,
        "is_neox_style": neox,
    }


def _packed(form: Form, maker: Maker) -> Arguments:
    """Query and key as views of one packed projection, row stride > width, donated in place."""
    (heads, key_heads), size = form.heads, form.size
    packed = maker.place(maker.normal(form.tokens, (heads + 2 * key_heads) * size), form.dtype)
    query, key, _ = packed.split([heads * size, key_heads * size, key_heads * size], dim=-1)
    shape = (form.tokens, -1, size)
    return arguments(query.view(shape), key.view(shape), *form.angles(maker), form.neox)


def _latent(form: Form, maker: Maker) -> Arguments:
    """The rotary parts of latent attention: the tail of wider heads, one head of a wider key."""
    wide = maker.place(maker.normal(form.tokens, form.heads[0], 128 + form.size), form.dtype)
    latent = maker.place(maker.normal(form.tokens, 1, 512 + form.size), form.dtype)
    query, key = wide[..., 128:], latent[..., 512:]
    return arguments(query, key, *form.angles(maker), form.neox)


def _far(form: Form, maker: Maker) -> Arguments:
    values = maker.normal(form.tokens, form.heads[0], form.size)
    query = far_rows(values, form.dtype, maker.device)
    return arguments(query, None, *form.angles(maker), form.neox)


def _inputs() -> Iterator[Inputs]:
    for dtype in FLOATS:
        for neox in (True, False):
            base = Form(dtype, neox)
            forms = [base]
            forms += [replace(base, tokens=tokens) for tokens in (0, 1, 33)]
            forms += [replace(base, heads=heads) for heads in ((1, 1), (3, 1), (4, 0), (2, 8))]
            forms += [replace(base, size=n, rotary=n) for n in (2, 32, 80, 96, 128, 192, 256)]
            forms += [
                replace(base, size=size, rotary=rotary)
                for size, rotary in ((128, 64), (64, 16), (80, 32), (64, 2), (512, 64), (96, 66))
            ]
            forms += [replace(base, layout=layout) for layout in ROW_LAYOUTS[1:]]
            forms += [replace(base, layout=layout, rotary=32) for layout in ("packed", "skewed")]
            forms += [replace(base, positions="same"), replace(base, positions="long", rotary=8)]
            forms += [replace(base, table=kind) for kind in ("own", "float32")]
            for form in dict.fromkeys(forms):
                yield Inputs(form.name, form.make)
            for rotary in (64, 32):
                form = replace(base, rotary=rotary)
                yield Inputs(f"{form.name}-qkv", partial(_packed, form))
            yield Inputs(f"{base.name}-latent", partial(_latent, base))


def cases() -> Iterator[Case]:
    """Yield the cases."""
    probes = [
        Form(dtype, neox, tokens=7, size=128, rotary=128 if neox else 64)
        for dtype in FLOATS
        for neox in (True, False)
    ]
    far = [Form(dtype, neox=True, tokens=2) for dtype in FLOATS[1:]]
    yield from TensorOperator(
        "rotary_embedding",
        rotary_embedding,
        inputs=list(_inputs()),
        probes=[Inputs(form.name, form.make) for form in probes],
        far=[Inputs(form.name, partial(_far, form)) for form in far],
        row_arguments=("query", "key", "position_ids"),
    ).cases()
