"""The workloads: batches of equal requests with fixed prompts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

BLOCK = 16
"""Tokens in a block of the KV cache."""


@dataclass(frozen=True)
class Workload:
    """A batch of equal requests.

    Attributes:
        batch: how many.
        prompt: tokens of each prompt.
        output: tokens generated for each.
    """

    batch: int
    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Parse "BATCHxPROMPTxOUTPUT".

        Raises:
            argparse.ArgumentTypeError: it has another form.
        """
        parts = text.split("x")
        if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form BATCHxPROMPTxOUTPUT")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt}x{self.output}"

    @property
    def request_tokens(self) -> int:
        """Tokens of a request in the KV cache, in whole blocks, and a block to spare."""
        return -(-(self.prompt + self.output) // BLOCK) * BLOCK + BLOCK

    @property
    def cached_tokens(self) -> int:
        """Tokens in the KV cache when all requests run at once."""
        return self.batch * self.request_tokens

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return the prompts: the same in every process, no two with a common beginning."""
        state, prompts = 12345 + self.batch, []
        for _ in range(self.batch):
            ids = []
            for _ in range(self.prompt):
                state = (1103515245 * state + 12345) % 2**31
                ids.append((state >> 8) % vocabulary)
            prompts.append(ids)
        return prompts


WORKLOADS = (Workload(128, 512, 128), Workload(1, 32, 256), Workload(32, 4096, 16))
SMOKE = (Workload(32, 128, 32), Workload(1, 32, 64))
CHECK = Workload(8, 64, 32)
"""Run once an engine with log-probabilities, to compare what is generated."""
