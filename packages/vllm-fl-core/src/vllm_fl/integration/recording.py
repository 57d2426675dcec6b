"""Which operators a model calls, with which arguments, how long they take, and one such call again.

Calls are timed with the device synchronised before and after, so this is for eager runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_fl.dispatch.calls import Function
from vllm_fl.dispatch.failure import describe_call
from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.types import OpImpl

Call = tuple[tuple[Any, ...], dict[str, Any]]


def synchronize() -> None:
    """Wait for the device, if there is one besides the CPU."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@dataclass
class Recorder:
    """Records calls of operators; an observer of :class:`OpManager`.

    Attributes:
        shared: addresses of storages that a recorded call need not copy: the model's parameters.
        wanted: operator -> calls, as described, whose arguments are kept.
        calls: operator -> call as described -> [number, seconds].
        kept: operator -> call as described -> arguments.
    """

    shared: Collection[int]
    wanted: Mapping[str, Collection[str]]
    calls: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    kept: dict[str, dict[str, Call]] = field(default_factory=dict)

    def __call__(self, impl: OpImpl, fn: Function) -> Function:
        """Return ``fn`` with its calls recorded."""
        op_name = impl.op_name

        def record_and_call(*args: Any, **kwargs: Any) -> Any:
            described = describe_call(args, kwargs)
            kept = self.kept.setdefault(op_name, {})
            if described in self.wanted.get(op_name, ()) and described not in kept:
                kept[described] = copied(op_name, (args, kwargs), self.shared)
            synchronize()
            began = time.perf_counter()
            result = fn(*args, **kwargs)
            synchronize()
            entry = self.calls.setdefault(op_name, {}).setdefault(described, [0, 0.0])
            entry[0] += 1
            entry[1] += time.perf_counter() - began
            return result

        return record_and_call


def copied(op_name: str, call: Call, shared: Collection[int]) -> Call:
    """Return a call with its tensors copied, but for those of ``shared`` storages.

    Of a paged cache that it updates, the copy has the blocks that the call names, and no others.
    """
    spec = get_spec(op_name)
    bound = spec.signature.bind(*call[0], **call[1])
    in_blocks = _blocks_copied(bound.arguments, spec.updated) if spec.updated else {}
    whole = {
        name: _copy(value, value.stride())
        for name, value in bound.arguments.items()
        if isinstance(value, torch.Tensor)
        and name not in in_blocks
        and value.untyped_storage().data_ptr() not in shared
    }
    bound.arguments |= {**whole, **in_blocks}
    return bound.args, bound.kwargs


def _copy(value: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    # clone() would make an expanded or padded layout dense.
    new = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
    return new.copy_(value)


def _blocks_copied(
    arguments: Mapping[str, Any], caches: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return copies of the caches that hold the blocks of the slots only, and slots in them."""
    slots = arguments["slot_mapping"]
    (block_size,) = {arguments[name].shape[1] for name in caches}
    blocks, places = torch.unique(slots.clamp(min=0) // block_size, return_inverse=True)
    inside = (places * block_size + slots % block_size).to(slots.dtype)
    copies = {name: _copy(arguments[name][blocks], arguments[name].stride()) for name in caches}
    return {**copies, "slot_mapping": torch.where(slots < 0, slots, inside)}


def overwritten_copied(op_name: str, call: Call) -> Call:
    """Return a call whose donated and written arguments are copies."""
    spec = get_spec(op_name)
    bound = spec.signature.bind(*call[0], **call[1])
    for name in spec.donated | spec.written:
        value = bound.arguments.get(name)
        if isinstance(value, torch.Tensor):
            bound.arguments[name] = _copy(value, value.stride())
    return bound.args, bound.kwargs


def time_call(op_name: str, fn: Function, call: Call, samples: int, limit: float) -> list[float]:
    """Time one call of an implementation.

    On CUDA the call is captured in a graph, as in a decoding step, if it can be; elsewhere the
    time includes that of the launch.

    Args:
        op_name: the operator.
        fn: the implementation.
        call: the arguments; only what the operator updates in place is changed.
        samples: how many times to take, at most.
        limit: seconds after which no further sample is taken.

    Returns:
        Seconds of one call, by sample.
    """
    ready = overwritten_copied(op_name, call)
    for _ in range(2):  # the first call may compile
        args, kwargs = overwritten_copied(op_name, ready)
        fn(*args, **kwargs)
    synchronize()
    on_cuda = any(isinstance(v, torch.Tensor) and v.is_cuda for v in (*call[0], *call[1].values()))
    run = _graph(fn, ready) if on_cuda else None
    times: list[float] = []
    end = time.perf_counter() + limit
    while len(times) < samples and (not times or time.perf_counter() < end):
        if run is None:
            args, kwargs = overwritten_copied(op_name, ready)
            synchronize()
            began = time.perf_counter()
            fn(*args, **kwargs)
            synchronize()
            times.append(time.perf_counter() - began)
        else:
            times.append(_replayed(run))
    return times


def _graph(fn: Function, call: Call) -> Callable[[], None] | None:
    """Return the replay of a captured call, or None when it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            fn(*call[0], **call[1])
    except RuntimeError:
        synchronize()
        return None
    replay: Callable[[], None] = graph.replay
    return replay


def _replayed(run: Callable[[], None], times: int = 20) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / times
