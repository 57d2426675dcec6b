"""What vllm-fl adds to vLLM's worker, reached with ``LLM.collective_rpc``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.handle import BoundOp
from vllm_fl.dispatch.report import operator_table

if TYPE_CHECKING:
    from vllm_fl.profiling.recorder import Recorder


class WorkerExtensionFL:
    """Mixed into vLLM's worker through ``parallel_config.worker_extension_cls``."""

    _fl_recorder: Recorder

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

    def fl_attention_backends(self) -> list[str]:
        """Return the attention backend classes of the model's layers, each once."""
        worker: Any = self
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        backends = [layer.attn_backend for layer in layers if hasattr(layer, "attn_backend")]
        return sorted({f"{backend.__module__}:{backend.__qualname__}" for backend in backends})

    def fl_profile_start(self) -> None:
        """Begin to record what runs on this worker's device."""
        from vllm.platforms import current_platform

        from vllm_fl.profiling.recorder import Recorder

        self._fl_recorder = Recorder(current_platform.device_type)

    def fl_profile_stop(self) -> dict[str, Any]:
        """Return what has been recorded since the start; see :class:`Recorder`."""
        return self._fl_recorder.stop()
