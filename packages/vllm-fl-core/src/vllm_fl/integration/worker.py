"""What vllm-fl adds to vLLM's worker, reached with ``LLM.collective_rpc``."""

from __future__ import annotations

from typing import Any

from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.handle import BoundOp
from vllm_fl.dispatch.report import operator_table


class WorkerExtensionFL:
    """Mixed into vLLM's worker through ``parallel_config.worker_extension_cls``."""

    def fl_count_calls(self, enabled: bool = True) -> None:
        """Switch the counting of operator calls in this worker on or off."""
        get_default_manager().count_calls(enabled)

    def fl_differences(self) -> list[dict[str, Any]]:
        """Return what VLLM_FL_COMPARE found: one row a layer, largest relative difference first."""
        comparison = get_default_manager().comparison
        if comparison is None:
            return []
        worker: Any = self
        modules = worker.model_runner.get_model().named_modules()
        handles = {name: m._op for name, m in modules if isinstance(vars(m).get("_op"), BoundOp)}
        names = {(handle.op_name, handle.number): name for name, handle in handles.items()}
        found = sorted(comparison.differences.values(), key=lambda d: -d.relative)
        return [{"layer": names.get((d.op_name, d.number), ""), **vars(d)} for d in found]

    def fl_operator_table(self) -> list[dict[str, Any]]:
        """Return one row an operator: what runs it here, from which wheel, how often called."""
        return operator_table(get_default_manager())
