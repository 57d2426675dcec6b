"""``moe_align_block_size``: full buffers, expert maps, and numbers that are no powers of two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_fl.testing.case import Arguments, Case
from vllm_fl.testing.checks import Inputs, Results, TensorOperator
from vllm_fl.testing.compare import Expected
from vllm_fl.testing.operators.routing import EXPERTS
from vllm_fl.testing.tensors import Maker, short


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
) -> tuple[Expected, ...]:
    """The oracle; the entries of an expert in ascending order."""
    ids = topk_ids.flatten().tolist()
    size = len(ids) + num_experts * (block_size - 1)
    if pad_sorted_ids:
        size += -size % block_size
    if len(ids) < num_experts:
        size = min(len(ids) * block_size, size)
    mapping = list(range(num_experts)) if expert_map is None else expert_map.tolist()
    members: dict[int, list[int]] = {}
    for position, expert in enumerate(ids):
        if 0 <= expert < num_experts:
            key = mapping[expert] if ignore_invalid_experts else expert
            if key >= 0:
                members.setdefault(key, []).append(position)
    entries: list[int] = []
    experts: list[int] = []
    for expert, positions in sorted(members.items()):
        positions += [len(ids)] * (-len(positions) % block_size)
        entries += positions
        label = expert if ignore_invalid_experts else mapping[expert]
        experts += [label] * (len(positions) // block_size)
    used = len(entries)
    entries += [len(ids)] * (size - used)
    experts += [-1] * (-(-size // block_size) - len(experts))
    return tuple(
        Expected(torch.tensor(values, dtype=torch.float64), torch.int32)
        for values in (entries, experts, [used])
    )


def by_position(results: Results, arguments: Arguments) -> Results:
    """Bring the entries of each expert into ascending order."""
    ids, block = arguments["topk_ids"].flatten(), arguments["block_size"]
    if len(results) != 3 or results[0] is None or results[0].dim() != 1:
        return results
    # One run of entries after the other, a run being what belongs to one expert. Entries that
    # are no positions keep the run that they stand in.
    entries = results[0].to(torch.int64)
    inside = (entries >= 0) & (entries < len(ids))
    blocks = torch.arange(len(entries), device=entries.device) // block
    first = torch.full((int(blocks.max()) + 1 if len(blocks) else 0,), -1, device=entries.device)
    if len(ids):
        owner = torch.where(inside, ids[entries.clamp(0, len(ids) - 1)].to(torch.int64), -1)
        first.scatter_reduce_(0, blocks, owner, "amax")
    change = torch.ones_like(first)
    change[1:] = (first[1:] != first[:-1]) | (first[1:] == -1)
    run = change.cumsum(0)[blocks] if len(blocks) else blocks
    order = torch.argsort(run * (len(ids) + 1) + entries.clamp(0, len(ids)), stable=True)
    return (results[0][order], *results[1:])


@dataclass(frozen=True)
class Form:
    """One call.

    Attributes:
        experts: how many.
        block: entries in a block.
        tokens: how many.
        k: choices of a token.
        ids: "different" (the experts of a token), "one" expert for all, "outside" (some outside
            the range).
        mapped: "" for no map, "half" (this rank has the second half), "odd" (every other
            expert), "none" (no expert is here).
        pad: ``pad_sorted_ids``.
        ignore: ``ignore_invalid_experts``.
        dtype: of the ids.
    """

    experts: int = 60
    block: int = 16
    tokens: int = 33
    k: int = 4
    ids: str = "different"
    mapped: str = ""
    pad: bool = False
    ignore: bool = False
    dtype: torch.dtype = torch.int32

    @property
    def name(self) -> str:
        """All of it."""
        flags = [self.mapped and f"map_{self.mapped}", self.pad and "pad", self.ignore and "ignore"]
        return "-".join(
            [
                f"{short(self.dtype)}-experts{self.experts}-block{self.block}-"
                f"{self.tokens}x{self.k}-{self.ids}",
                *(flag for flag in flags if flag),
            ]
        )

    def make(self, maker: Maker) -> Arguments:
        """Make the arguments."""
        shape = (self.tokens, self.experts)
        ids = maker.uniform(*shape, low=0.0, high=1.0).argsort(dim=-1)[:, : self.k]
        if self.ids == "one":
            ids = torch.full((self.tokens, self.k), self.experts - 1)
        if self.ids == "outside":
            ids[::3, 0] = -1
            ids[1::3, -1] = self.experts
        expert_map = None
        if self.mapped:
            numbers = torch.arange(self.experts)
            here = {
                "half": numbers >= self.experts // 2,
                "odd": numbers % 2 == 1,
                "none": numbers < 0,
            }[self.mapped]
            local = torch.where(here, here.cumsum(0) - 1, -1)
            expert_map = maker.place(local, torch.int32, "offset")
        return {
            "topk_ids": maker.place(ids, self.dtype),
            "block_size": self.block,
            "num_experts": self.experts,
            "expert_map": expert_map,
            "pad_sorted_ids": self.pad,
            "ignore_invalid_experts": self.ignore,
        }


def _forms() -> Iterator[Form]:
    base = Form()
    for experts in EXPERTS:
        for block in (4, 16, 48, 64):
            yield replace(base, experts=experts, block=block, k=min(4, experts))
        some = replace(base, experts=experts, k=min(8, experts))
        for tokens in (0, 1, 2, 300):
            yield replace(some, tokens=tokens)
        yield replace(some, k=1)
        yield replace(some, k=experts, tokens=9)
        yield replace(some, ids="one")
        yield replace(some, ids="outside")
        yield replace(some, dtype=torch.int64)
        yield replace(some, pad=True)
        for mapped in ("half", "odd", "none"):
            for ignore in (False, True):
                yield replace(some, mapped=mapped, ignore=ignore)
                yield replace(some, mapped=mapped, ignore=ignore, tokens=1)
    yield replace(base, mapped="odd", ids="outside")
    yield replace(base, mapped="odd", ids="outside", ignore=True, pad=True)
    yield replace(base, ignore=True)
    yield replace(base, tokens=3000, k=8, block=128)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    probes = [Form(tokens=300), Form(144, k=8, mapped="half"), Form(257, k=2, pad=True)]
    yield from TensorOperator(
        "moe_align_block_size",
        moe_align_block_size,
        inputs=[Inputs(form.name, form.make) for form in dict.fromkeys(_forms())],
        probes=[Inputs(form.name, form.make) for form in probes],
        far=[],
        canonical=by_position,
    ).cases()
