"""Captured CUDA graphs of a live engine, by the policy under which they were captured.

A captured graph keeps the kernels of the implementations that were bound then. When the policy of
a live engine changes, its graphs must be captured anew; those of the policies used last are kept,
so that two configurations can take turns without capturing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeAlias

from vllm_fl.dispatch.errors import VllmFLError

Graphs: TypeAlias = list[dict[Any, Any]]


class NotRebindable(VllmFLError, RuntimeError):
    """The engine holds compiled code or graphs that cannot be made anew while it lives."""


def check_rebindable(vllm_config: Any) -> None:
    """Refuse an engine whose model is compiled: its code has the implementations inlined.

    Raises:
        NotRebindable: it says why.
    """
    from vllm.config import CompilationMode

    mode = vllm_config.compilation_config.mode
    if mode != CompilationMode.NONE:
        raise NotRebindable(
            f"The model is compiled (mode {mode}), with the implementations inlined; another "
            "configuration needs a restart."
        )
    if vllm_config.speculative_config is not None:
        raise NotRebindable("Graphs of a draft model are not captured anew; a restart is needed.")


def stores(runner: Any) -> Graphs:
    """Return the dictionaries in which vLLM's model runner and its wrappers keep their graphs."""
    manager = getattr(runner, "cudagraph_manager", None)  # model runner V2
    if manager is not None:
        pieces = getattr(manager, "breakable_cg_runner", None)
        return [manager.graphs, *([] if pieces is None else [pieces.entries])]
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    return [
        *(wrapper.concrete_cudagraph_entries for wrapper in CUDAGraphWrapper._all_instances),
        *(wrapper.entries for wrapper in BreakableCUDAGraphWrapper._all_instances),
    ]


class GraphCache:
    """The graphs of one model runner.

    Args:
        runner: vLLM's model runner, after it has captured its graphs.
        key: of the policy in force.
        keep: for how many policies besides the one in force graphs are kept.
    """

    def __init__(self, runner: Any, key: str, keep: int = 2) -> None:
        self._runner = runner
        self._key = key
        self._keep = keep
        self._kept: OrderedDict[str, Graphs] = OrderedDict()

    def switch(self, key: str) -> bool:
        """Use the graphs of another policy, which is in force; return whether it captured any."""
        if key == self._key:
            return False
        current = stores(self._runner)
        if not any(current):
            self._key = key
            return False
        self._kept[self._key] = [dict(store) for store in current]
        for store in current:
            store.clear()
        self._key = key
        kept = self._kept.pop(key, None)
        if kept is not None:
            for store, graphs in zip(current, kept, strict=True):
                store.update(graphs)
            return False
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)
        self._runner.capture_model()
        return True
