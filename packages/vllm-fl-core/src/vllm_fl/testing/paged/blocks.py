"""Where the tokens of a scenario's requests lie in a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl.testing.paged.scenario import Scenario

SPARE_BLOCKS = 5


class Blocks:
    """Which cache blocks a request has: shuffled, with spare ones between.

    Block 0 is vLLM's null block. The last block stays unused, too: slot -1 would be in it.
    """

    def __init__(self, scenario: Scenario, block_size: int) -> None:
        self.block_size = block_size
        need = {r: -(-length // block_size) for r, length in scenario.lengths.items()}
        self.count = 1 + sum(need.values()) + SPARE_BLOCKS
        order = torch.randperm(self.count - 2, generator=torch.Generator().manual_seed(5)) + 1
        numbers = iter(order.tolist())
        self.of = {request: [next(numbers) for _ in range(n)] for request, n in need.items()}
        self.used: dict[int, int] = {}
        for request, length in scenario.lengths.items():
            for index, block in enumerate(self.of[request]):
                self.used[block] = min(block_size, length - index * block_size)

    def shift(self, blocks: int) -> None:
        """Put so many unused blocks before all others."""
        self.count += blocks
        self.of = {r: [number + blocks for number in numbers] for r, numbers in self.of.items()}
        self.used = {number + blocks: slots for number, slots in self.used.items()}

    def slot(self, request: int, position: int) -> int:
        """Return the cache slot of a token."""
        block = self.of[request][position // self.block_size]
        return block * self.block_size + position % self.block_size

    def table(
        self, step: dict[int, int], done: dict[int, int], window: int | None, padding: int
    ) -> Tensor:
        """Return the block table; blocks that a window has passed are given back, as in vLLM."""
        width = max(len(blocks) for blocks in self.of.values())
        table = torch.zeros((len(step) + padding, width), dtype=torch.int32)
        for row, (request, new) in enumerate(step.items()):
            first = 0 if window is None else max(0, done[request] - window + 1) // self.block_size
            last = -(-(done[request] + new) // self.block_size)
            blocks = self.of[request][first:last]
            table[row, first:last] = torch.tensor(blocks, dtype=torch.int32)
        return table
