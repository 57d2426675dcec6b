"""What the AutoTune engine asks of a worker; all answers are JSON-ready."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from vllm_fl.dispatch import state
from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.ops import CATALOGUE
from vllm_fl.dispatch.phases import join_choice
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl.dispatch.predicate import predicate
from vllm_fl.integration import attention, live_attention
from vllm_fl.integration.graphs import GraphCache, check_rebindable


class TuningMethods:
    """Mixed into vLLM's worker with :class:`WorkerExtensionFL`."""

    def fl_policy(self) -> dict[str, Any]:
        """Return the policy in force in this worker."""
        return state.get_global_policy().to_dict()

    def fl_set_policy(self, policy: dict[str, Any]) -> dict[str, Any]:
        """Set the policy: live handles are re-bound, CUDA graphs captured anew if need be.

        Returns:
            "bound": operator -> implementation; "captured": whether graphs were; "seconds".

        Raises:
            NotRebindable: the model is compiled, or cannot have the attention that is chosen.
        """
        worker: Any = self
        check_rebindable(worker.vllm_config)
        began = time.perf_counter()
        if "_fl_graphs" not in vars(worker):
            worker._fl_graphs = GraphCache(
                worker.model_runner, state.get_global_policy().fingerprint()
            )
        new = SelectionPolicy.from_dict(**policy)
        choices = live_attention.live_choices(worker.vllm_config)
        live_attention.rebind(choices, new)
        if new != state.get_global_policy():
            state.set_global_policy(new)
        captured = worker._fl_graphs.switch(new.fingerprint())
        return {
            "bound": {**chosen(), **live_attention.serving(choices)},
            "captured": captured,
            "seconds": time.perf_counter() - began,
        }

    def fl_candidates(self) -> dict[str, Any]:
        """Return what can run each operator here, the implementation in force first.

        Where implementations may differ by phase, pairs that go together are choices, too. Orders
        of single operators and strictness are left aside; vendors and lists count. "live" are the
        choices that this engine's attention can be re-bound to; "unable" says why implementations
        cannot serve the model, as far as they were asked when it was built; "serves" is whether
        the first one does.
        """
        worker: Any = self
        manager, policy = get_default_manager(), state.get_global_policy()
        free = replace(policy, per_op_order=(), strict=False)
        choices = live_attention.live_choices(worker.vllm_config)
        first, found = {**chosen(), **live_attention.serving(choices)}, {}
        for op_name, spec in CATALOGUE.items():
            ranking = manager.rank(op_name, free)
            ids = dict.fromkeys([first[op_name]] if op_name in first else [])
            ids |= dict.fromkeys(impl.impl_id for impl in ranking.order)
            if spec.phases:
                pairs = attention.choices_by_phase(ranking.order, worker.vllm_config)
                ids |= dict.fromkeys(pairs)
            found[op_name] = {
                "available": list(ids),
                "live": live_attention.among(choices, ids) if spec.phases else [],
                "serves": bool(manager.usage.serving(op_name)),
                "unable": manager.usage.unable.get(op_name, {}),
                "references": [
                    impl.impl_id for impl in ranking.order if impl.kind.value == "reference"
                ],
                "refused": {impl.impl_id: no.reason for impl, no in ranking.rejected},
            }
        return found

    def fl_used(self) -> dict[str, list[str]]:
        """Return operator, with its phase where phases differ -> what the model is built with."""
        used = get_default_manager().usage.impl_ids
        return {name: sorted(ids) for name, ids in sorted(used.items())}

    def fl_record(self, wanted: dict[str, list[str]]) -> None:
        """Start recording the calls of operators, and keep the arguments of the wanted ones."""
        from vllm_fl.integration.recording import Recorder

        worker: Any = self
        model = worker.model_runner.get_model()
        tensors = (*model.parameters(), *model.buffers())
        shared = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        worker._fl_calls = Recorder(shared, wanted)
        get_default_manager().observe(worker._fl_calls)

    def fl_recorded(self) -> dict[str, dict[str, list[float]]]:
        """End recording; return operator -> call -> [number, seconds]."""
        worker: Any = self
        get_default_manager().observe(None)
        return worker._fl_calls.calls

    def fl_called(self) -> list[str]:
        """Return the operators called since this was asked last; from now on calls are counted."""
        manager = get_default_manager()
        called = {op_name for op_name, _ in manager.counters.calls}
        manager.counters.reset()
        if not manager.counters.enabled:
            manager.count_calls()
        return sorted(called)

    def fl_time(
        self, op_name: str, impl_id: str, call: str, samples: int, limit: float
    ) -> dict[str, Any]:
        """Time an implementation on a call that was kept.

        Returns:
            "seconds": by sample; or "refused": why there are none.
        """
        import torch

        from vllm_fl.integration.recording import time_call

        worker: Any = self
        manager = get_default_manager()
        impl = manager.registry.get_implementation(op_name, impl_id)
        kept = worker._fl_calls.kept.get(op_name, {}).get(call)
        if impl is None or kept is None:
            return {"refused": "the call was not repeated while its arguments were recorded"}
        decide = predicate(impl)
        decision = decide(*kept[0], **kept[1]) if decide is not None else None
        if decision is not None and not decision:
            return {"refused": decision.reason}
        with torch.inference_mode():
            return {"seconds": time_call(op_name, manager.function(impl), kept, samples, limit)}

    def fl_forget_recorded(self) -> None:
        """Free the arguments of recorded calls."""
        worker: Any = self
        worker._fl_calls = None


def chosen() -> dict[str, str]:
    """Return operator -> the implementation in force, or those of the phases in one text.

    That is the policy's first choice, but of what is asked when the model is built what serves.
    """
    manager = get_default_manager()
    rankings = {op_name: manager.rank_by_phase(op_name) for op_name in CATALOGUE}
    impls = {
        op_name: manager.usage.serving(op_name) or {p: r.order[0] for p, r in by_phase.items()}
        for op_name, by_phase in rankings.items()
        if all(ranking.order for ranking in by_phase.values())
    }
    return {
        op_name: join_choice({phase: impl.impl_id for phase, impl in by_phase.items()})
        for op_name, by_phase in impls.items()
    }
