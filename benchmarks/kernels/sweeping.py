"""Times the tiles that ``vllm_fl_flaggems.tiles`` offers beside the one it chooses."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.operator import Operator, Shape, Sweep
from benchmarks.kernels.operators import OPERATORS
from benchmarks.kernels.timing import Timed, buffers, capture, run_rounds
from vllm_fl_flaggems.kernels import launch


@contextmanager
def without_overlap() -> Iterator[None]:
    """Launch as if kernels could not overlap."""
    options = launch.launch_options()
    before = dict(options)
    options.clear()
    options["OVERLAP"] = False
    yield
    options.clear()
    options.update(before)


def compile_tile(name: str, shape: Shape, tile: Any) -> str:
    """Run once, so that the compiled kernel is in Triton's cache on disk; return what fails."""
    operator = OPERATORS[name]
    try:
        sweep_of(operator).launch(*operator.make(shape, "cuda", 0), tile=tile)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{name} {shape} {tile}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def compile_all(jobs: Sequence[tuple[str, Shape, Any]]) -> set[tuple[str, Shape, Any]]:
    """Compile in several processes; print what fails and return those jobs."""
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=12, mp_context=context) as pool:
        failures = list(pool.map(compile_tile, *zip(*jobs, strict=True)))
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - start:.0f} s")
    for why in filter(None, failures):
        print(f"left out: {why}")
    return {job for job, why in zip(jobs, failures, strict=True) if why}


def sweep_of(operator: Operator) -> Sweep:
    """Return the sweep of an operator that has one."""
    if operator.sweep is None:
        raise ValueError("this operator has no tiles to compare")
    return operator.sweep


def sweep(name: str, shape: Shape, broken: set[Any]) -> dict[str, Any]:
    """Time every tile on a shape but the broken ones; the chosen one also without overlap."""
    operator = OPERATORS[name]
    tiles = sweep_of(operator)
    sets = buffers(operator, shape)
    fresh = partial(operator.make, shape, "cuda", 0)
    expected = operator.oracle(*fresh())
    expected_us = operator.expected_us(shape)
    chosen = tiles.tile(shape)
    timed: dict[Any, Timed] = {}
    for tile in dict.fromkeys([chosen, *tiles.rivals(shape)]):
        if tile in broken:
            continue
        call = partial(tiles.launch, tile=tile)
        error, right = operator.agree(call(*fresh()), expected)
        if not right:
            raise AssertionError(f"{name} {shape} {tile}: wrong result, error {error:.1e}")
        timed[tile] = capture(call, sets, expected_us)
    with without_overlap():
        plain = capture(partial(tiles.launch, tile=chosen), sets, expected_us)
    run_rounds([*timed.values(), plain])
    order = sorted(timed, key=lambda tile: timed[tile].us)
    return {
        "op": name,
        "shape": shape,
        "chosen": str(chosen),
        "chosen_us": timed[chosen].us,
        "chosen_without_overlap_us": plain.us,
        "tiles": {str(tile): timed[tile].us for tile in order},
    }


def sweep_lines(found: dict[str, Any]) -> str:
    """Return the best tiles of a shape as text."""
    best = list(found["tiles"].items())[:4]
    lines = [
        f"{found['op']} {found['shape']}: chosen {found['chosen_us']:.2f} us "
        f"({found['chosen_us'] / best[0][1]:.3f} of the best), "
        f"{found['chosen_without_overlap_us']:.2f} without overlap; {found['chosen']}"
    ]
    return "\n".join(lines + [f"    {us:8.2f}  {tile}" for tile, us in best])
