"""What vllm-fl adds to vLLM's worker, reached with ``LLM.collective_rpc``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import discovery
from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.handle import BoundOp
from vllm_fl.dispatch.report import operator_table
from vllm_fl.integration import caches
from vllm_fl.integration.handover import adopt
from vllm_fl.integration.lenient import lenient
from vllm_fl.integration.tuning import TuningMethods
from vllm_fl.integration.warmup import warm_up

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_fl.profiling.recorder import Recorder


def start_backends(vllm_config: VllmConfig, rank: int) -> None:
    """Let each usable backend do what it has to before a model is built in this process.

    Raises:
        VllmFLError: a backend refuses.
        Exception: a backend fails, and the policy is strict.
    """
    adopt(vllm_config)
    manager = get_default_manager()
    manager.ensure_initialized()
    if manager.usage.oplist is not None:
        manager.usage.oplist.rank = rank
    for record in discovery.get_discovered_plugins():
        if record.decision and record.backend is not None:
            with lenient(f"Backend {record.name} could not start"):
                record.backend.start_worker(rank)


class _WorkerHooks:
    """What runs around vLLM's own methods of a worker."""

    _fl_profiled = False

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Start the backends in this process, whose device is set by now, then load the model.

        Nothing of it is what an earlier engine of this process was given.
        """
        worker: Any = self
        start_backends(worker.vllm_config, worker.rank)
        caches.forget()
        parent: Any = super()
        return parent.load_model(*args, **kwargs)

    def determine_available_memory(self, *args: Any, **kwargs: Any) -> Any:
        """Let vLLM's own do it, and note whether it runs the model: on CPU it need not."""
        worker: Any = self
        runner = worker.model_runner
        profile_run = runner.profile_run

        def noted() -> None:
            profile_run()
            self._fl_profiled = True

        runner.profile_run = noted
        parent: Any = super()
        try:
            return parent.determine_available_memory(*args, **kwargs)
        finally:
            del runner.profile_run

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run what the backends' kernels need compiled, then let vLLM warm up.

        In this order no graph is captured yet, which would stand in for a smaller step, and what
        vLLM says about kernels that are compiled too late is right.
        """
        worker: Any = self
        warm_up(worker.vllm_config, worker.model_runner, self._fl_profiled)
        parent: Any = super()
        return parent.compile_or_warm_up_model(*args, **kwargs)


class WorkerExtensionFL(TuningMethods):
    """Mixed into vLLM's worker through ``parallel_config.worker_extension_cls``.

    vLLM appends this class to the bases of the worker's class, where it can add methods but not
    go before the worker's own. So it makes a worker of a subclass that does.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> WorkerExtensionFL:
        """Make a worker with hooks; its own ``__init__`` follows."""
        hooked: type[WorkerExtensionFL] = type(cls.__name__, (_WorkerHooks, cls), {})
        return object.__new__(hooked)

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
