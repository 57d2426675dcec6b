"""Times of calls on a GPU: replays of CUDA graphs over rotating buffers, in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.kernels.operator import Call, Inputs, Operator, Shape

ROUNDS = 7
ROTATED_BYTES = 300e6  # more than the 50 MB of cache by far
GRAPH_US = 1000.0  # a graph runs about this long, so that starting it does not count
GIB = 1 << 30


@dataclass
class Timed:
    """A candidate on a shape.

    Attributes:
        graph: the captured calls.
        calls: their number.
        times: microseconds a call, one entry a round.
        kept: the results that the graph writes to.
    """

    graph: torch.cuda.CUDAGraph
    calls: int
    times: list[float] = field(default_factory=list)
    kept: deque[Any] = field(default_factory=deque)

    def replay(self) -> None:
        """Run once and remember the time."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.times.append(start.elapsed_time(end) * 1000 / self.calls)

    @property
    def us(self) -> float:
        """The median."""
        return statistics.median(self.times)


def buffers(operator: Operator, shape: Shape) -> list[Inputs]:
    """Return the input sets that a graph rotates over."""
    sets = math.ceil(ROTATED_BYTES / operator.traffic(shape))
    return [operator.make(shape, "cuda", seed) for seed in range(max(2, min(64, sets)))]


def capture(call: Call, sets: list[Inputs], expected_us: float) -> Timed:
    """Capture calls over rotating buffers; as many results as sets stay alive."""
    rotations = math.ceil(max(1.0, min(GRAPH_US / expected_us, 512) / len(sets)))
    for inputs in sets[:2]:
        call(*inputs)
    torch.cuda.synchronize()
    timed = Timed(torch.cuda.CUDAGraph(), rotations * len(sets))
    timed.kept = deque(maxlen=len(sets))
    with torch.cuda.graph(timed.graph):
        for _ in range(rotations):
            for inputs in sets:
                timed.kept.append(call(*inputs))
    timed.graph.replay()
    torch.cuda.synchronize()
    return timed


def run_rounds(candidates: Sequence[Timed]) -> None:
    """Replay all candidates in turn."""
    for timed in candidates:  # the clock rises before anything counts
        timed.graph.replay()
    for _ in range(ROUNDS):
        for timed in candidates:
            timed.replay()


def host_us(call: Call, inputs: Inputs) -> float:
    """Return the microseconds that the host needs for an eager call, the queue not being full."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            call(*inputs)
        times.append((time.perf_counter() - start) * 1e4)
    torch.cuda.synchronize()
    return statistics.median(times)


def copy_rate() -> float:
    """Return GB/s at which a kernel reads and writes memory, both counted."""
    pairs = [tuple(torch.randn(GIB // 4, device="cuda") for _ in "ab") for _ in "ab"]
    # A kernel that reads and writes: a captured copy_ is the slower work of a copy engine.
    timed = capture(lambda source, target: torch.neg(source, out=target), pairs, 500.0)
    run_rounds([timed])
    return 2 * GIB / timed.us / 1000
