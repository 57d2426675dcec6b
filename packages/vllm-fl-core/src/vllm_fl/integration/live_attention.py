"""Attention that can be chosen anew in a live engine: for the tuner.

The model of such an engine is built with one backend out of all implementations that can serve it
and lay its cache out alike. Each step takes the one that was bound last for its phase. Engines
that serve are built with what is chosen when they start, as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.phases import join_choice, split_choice
from vllm_fl.integration.graphs import NotRebindable

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

    from vllm_fl.dispatch.policy import SelectionPolicy
    from vllm_fl.dispatch.types import OpImpl
    from vllm_fl.integration.phased_attention import PhasedBackend

OPERATOR = "attention_backend"


class LiveChoice:
    """Which implementation serves the steps of each phase.

    Args:
        backends: implementation id -> its backend class; all lay the cache out alike.
        refused: implementation id -> why it is not among them.
        needs: what the layers need, as the operator's arguments.

    Attributes:
        backends: implementation id -> its backend class.
    """

    def __init__(
        self,
        backends: Mapping[str, type[AttentionBackend]],
        refused: Mapping[str, str],
        needs: Mapping[str, Any],
    ) -> None:
        self.backends = dict(backends)
        self._refused = dict(refused)
        self._needs = dict(needs)
        self._bound: dict[str, tuple[OpImpl, type[AttentionBackend]]] = {}

    def __call__(self, phase: str) -> type[AttentionBackend]:
        """Return the backend that serves the steps of a phase."""
        return self._bound[phase][1]

    def find(self, policy: SelectionPolicy) -> dict[str, OpImpl]:
        """Return phase -> the implementation that a policy chooses.

        Raises:
            NotRebindable: it is not among those of this engine; the text says why.
        """
        rankings = get_default_manager().rank_by_phase(OPERATOR, policy, ((), self._needs))
        phases = get_spec(OPERATOR).phases
        found = {phase: rankings.get(phase, rankings.get("")) for phase in phases}
        chosen = {phase: r.order[0] for phase, r in found.items() if r is not None and r.order}
        for phase in phases:
            impl_id = chosen[phase].impl_id if phase in chosen else "none"
            if impl_id not in self.backends:
                reason = self._refused.get(impl_id, "it cannot run here")
                raise NotRebindable(
                    f"The policy chooses {impl_id} for the attention of {phase}, and this engine's "
                    f"model was built with {', '.join(self.backends)}: {reason}. It needs a "
                    "restart."
                )
        return chosen

    def bind(self, chosen: Mapping[str, OpImpl]) -> None:
        """Serve the next steps with these implementations, by phase."""
        self._bound = {p: (impl, self.backends[impl.impl_id]) for p, impl in chosen.items()}

    @property
    def bound(self) -> dict[str, OpImpl]:
        """Phase -> the implementation that serves it."""
        return {phase: impl for phase, (impl, _) in self._bound.items()}


def make_live(choice: LiveChoice) -> type[PhasedBackend]:
    """Return the backend out of which a model is built whose attention can be chosen anew."""
    from vllm_fl.integration import phased_attention

    backends = tuple(dict.fromkeys(choice.backends.values()))
    name = "".join(("Live", *(backend.__name__ for backend in backends)))
    serving = dict.fromkeys(get_spec(OPERATOR).phases, backends)
    return phased_attention.combine(name, serving, choice)


def live_choices(vllm_config: VllmConfig) -> list[LiveChoice]:
    """Return the choices of the model's attention layers; none unless all of them are live."""
    layers: Iterable[Any] = vllm_config.compilation_config.static_forward_context.values()
    impls = [layer.impl for layer in layers if hasattr(layer, "impl")]
    choices = [getattr(impl, "choose", None) for impl in impls]
    live = [choice for choice in choices if isinstance(choice, LiveChoice)]
    return list(dict.fromkeys(live)) if len(live) == len(choices) else []


def rebind(choices: Iterable[LiveChoice], policy: SelectionPolicy) -> None:
    """Let the next steps be served by what a policy chooses; change nothing if one cannot.

    Raises:
        NotRebindable: a choice is not among the implementations of its layers.
    """
    manager = get_default_manager()
    for choice, chosen in [(choice, choice.find(policy)) for choice in choices]:
        choice.bind(chosen)
        for phase, impl in chosen.items():
            manager.usage.note(impl, phase if len(set(chosen.values())) > 1 else "")


def serving(choices: Iterable[LiveChoice]) -> dict[str, str]:
    """Return operator -> the implementations that serve, as ``join_choice`` writes them."""
    texts = {
        join_choice({phase: impl.impl_id for phase, impl in choice.bound.items()})
        for choice in choices
    }
    return {OPERATOR: " and ".join(sorted(texts))} if texts else {}


def among(choices: Iterable[LiveChoice], texts: Iterable[str]) -> list[str]:
    """Return those of some choices, as ``join_choice`` writes them, that all layers can take."""
    sets = [set(choice.backends) for choice in choices]
    common = set.intersection(*sets) if sets else set()
    return [text for text in texts if common.issuperset(split_choice(OPERATOR, text).values())]
