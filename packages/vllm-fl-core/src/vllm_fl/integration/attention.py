"""Choosing the attention backend: dispatch ranks, the backend class says what it cannot do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.phases import DECODE, PREFILL, join_choice, phase_name, split_name
from vllm_fl.dispatch.policy import Ranking
from vllm_fl.dispatch.state import current_config, get_policy
from vllm_fl.dispatch.types import BackendImplKind, OpImpl, load_object
from vllm_fl.integration.attention_checks import context_parallel_problems, wrapping_problems
from vllm_fl.integration.handover import adopt, architectures, note_choice, wants_live_attention
from vllm_fl.integration.live_attention import OPERATOR, LiveChoice, make_live

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = get_logger("vllm_fl.integration")


class NoAttentionBackend(ValueError):
    """No implementation can serve a layer group; the message gives each one's reasons."""


def is_vllm_s_choice(selected: AttentionBackendEnum | None) -> bool:
    """Whether the user asked for a backend by a name that vLLM itself knows a class for."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return selected is not None and selected is not AttentionBackendEnum.CUSTOM


def is_user_s_order() -> bool:
    """Whether the policy names implementations for the operator, which then must work.

    What the platform's defaults name may fall back.
    """
    settings = current_config()
    orders = {name: o for name, o in get_policy().per_op_order if split_name(name)[0] == OPERATOR}
    return any(
        not settings.is_of_platform(name) or settings["op_backends"].get(name) != order
        for name, order in orders.items()
    )


def _stands_back(impl: OpImpl, platform: Any, selected: AttentionBackendEnum | None) -> bool:
    """Whether vLLM's own selection goes before an implementation.

    That is so for the plain PyTorch one, where vLLM has kernels and nobody asked for it.
    """
    return (
        impl.kind is BackendImplKind.REFERENCE
        and platform.vllm_has_attention
        and selected is None
        and not is_user_s_order()
        and get_policy().prefer != BackendImplKind.REFERENCE.value
    )


@dataclass(frozen=True)
class _Candidate:
    """An implementation and the backend class that it gives for what the layers need."""

    impl: OpImpl
    backend: type[AttentionBackend]
    path: str

    @property
    def described(self) -> str:
        return f"{self.path} ({self.impl.impl_id}, {self.impl.wheel or 'by hand'})"


class _Selection:
    """One selection: what the layers need, and why implementations cannot serve them."""

    def __init__(
        self,
        platform: Any,
        selected: AttentionBackendEnum | None,
        config: AttentionSelectorConfig,
        vllm_config: VllmConfig,
    ) -> None:
        self.platform = platform
        self.selected = selected
        self.config = config
        self.vllm_config = vllm_config
        self.architectures = architectures(vllm_config)
        self.needs = {"use_mla": config.use_mla, "use_sparse": config.use_sparse}
        self.refusals: dict[tuple[str, str], str] = {}

    def refuse(self, choice: str, why: str, more: str = "") -> None:
        """Note why a choice is refused, for the message, each once; ``more`` describes it there."""
        self.refusals[choice, why] = f"  {choice}{more}: {why}"

    def refuse_for_model(self, impl: OpImpl, why: str, more: str = "") -> None:
        """Refuse an implementation that cannot serve the layers, and keep why for the tuner."""
        self.refuse(impl.impl_id, why, more)
        get_default_manager().usage.unable.setdefault(OPERATOR, {})[impl.impl_id] = why

    def candidates(self, ranking: Ranking, strict: bool) -> Iterator[_Candidate]:
        """Yield the implementations whose class accepts the configuration, in order.

        Args:
            ranking: the order.
            strict: the first one or none, and what it raises is raised.
        """
        manager = get_default_manager()
        for impl, decision in ranking.rejected:
            self.refuse(impl.impl_id, decision.reason)
        for impl in ranking.order[:1] if strict else ranking.order:
            if _stands_back(impl, self.platform, self.selected):
                self.refuse(impl.impl_id, "vLLM's own attention backends go before it")
                continue
            try:
                reference = manager.function(impl)(**self.needs)
                backend = load_object(reference)
                problems = [
                    *backend.validate_configuration(
                        device_capability=self.platform.get_device_capability(),
                        **self.config._asdict(),
                    ),
                    *context_parallel_problems(backend, self.vllm_config),
                    *wrapping_problems(backend, self.architectures),
                ]
            except Exception as error:
                if strict:
                    raise
                self.refuse_for_model(impl, f"{type(error).__name__}: {error}")
                logger.warning("%s of %s failed: %r", impl.impl_id, OPERATOR, error)
                continue
            if problems:
                why = "; ".join(problems)
                if (impl.impl_id, why) not in self.refusals:
                    logger.info("Attention is not by %s: %s", impl.impl_id, why)
                self.refuse_for_model(impl, why, f" ({backend.get_name()}, {reference})")
                continue
            yield _Candidate(impl, backend, str(reference).replace(":", "."))

    def joined(self, parts: Mapping[str, _Candidate]) -> tuple[type[AttentionBackend], str] | None:
        """Return the class for the candidates of the phases, and its name; None if refused."""
        who = join_choice({phase: part.impl.impl_id for phase, part in parts.items()})
        backends = {phase: part.backend for phase, part in parts.items()}
        (backend, path), *others = dict.fromkeys((p.backend, p.path) for p in parts.values())
        if others:
            from vllm_fl.integration.phased_attention import PhasedBackend, by_phase, disagreement

            problem = disagreement(backends[DECODE], backends[PREFILL])
            problem = problem or "; ".join(wrapping_problems(PhasedBackend, self.architectures))
            if problem:
                self.refuse(who, problem)
                logger.warning("%s is not used: %s", who, problem)
                return None
            backend = by_phase(backends[DECODE], backends[PREFILL])
            path = f"{backend.__module__}.{backend.__qualname__}"
        name = backend.get_name()
        if self.selected is not None and self.selected.name != name:
            self.refuse(who, f"it is {name}, and {self.selected.name} was asked for")
            return None
        return backend, path

    def made_live(
        self, parts: Mapping[str, _Candidate]
    ) -> tuple[type[AttentionBackend], str] | None:
        """Return the class, and its name, of all that lay the cache out as the given ones do.

        None where there is no other one, or plain PyTorch is chosen, which others are compared
        with.

        Args:
            parts: phase -> the candidate that serves it first.
        """
        from vllm_fl.integration.phased_attention import (
            PhasedBackend,
            block_sizes_of,
            disagreement,
        )

        if wrapping_problems(PhasedBackend, self.architectures):
            return None
        free = replace(get_policy(), per_op_order=(), strict=False)
        ranking = get_default_manager().rank(OPERATOR, free, ((), self.needs))
        found = {part.impl.impl_id: part.backend for part in parts.values()}
        if any(part.impl.kind is BackendImplKind.REFERENCE for part in parts.values()):
            return None
        for candidate in self.candidates(ranking, strict=False):
            impl_id, backend = candidate.impl.impl_id, candidate.backend
            if impl_id in found:
                continue
            problems = [disagreement(other, backend) for other in found.values()]
            if candidate.impl.kind is BackendImplKind.REFERENCE:
                problems = ["plain PyTorch is what others are compared with"]
            elif not any(problems) and not block_sizes_of((*found.values(), backend)):
                problems = ["there is no block size that all of them have"]
            problem = next(filter(None, problems), "")
            if problem:
                self.refuse(impl_id, problem)
            else:
                found[impl_id] = backend
        if len(found) < 2:
            return None
        choice = LiveChoice(found, dict(self.refusals.keys()), self.needs)
        choice.bind({p: (parts.get(p) or parts[""]).impl for p in get_spec(OPERATOR).phases})
        backend = make_live(choice)
        logger.info("Attention can be chosen anew among %s", ", ".join(found))
        return backend, f"{backend.__module__}.{backend.__qualname__}"


def select_backend(
    platform: Any,
    selected: AttentionBackendEnum | None,
    config: AttentionSelectorConfig,
) -> str:
    """Return the qualified name of the attention backend class for a layer group.

    The implementations of ``attention_backend`` are asked in the policy's order; the first whose
    class accepts the configuration is taken. Where decode and prefill have orders of their own,
    the first of each that go together are made one class. What the user asked for with
    ``--attention-backend`` is taken or refused, never replaced. The tuner's engine gets a class
    that can be any of those that lay the cache out alike, see ``live_attention``.

    Args:
        platform: the platform class.
        selected: the user's choice; None for none.
        config: what the layers need.

    Raises:
        NoAttentionBackend: none can serve it.
    """
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    vllm_config = get_current_vllm_config()
    adopt(vllm_config)
    manager, strict = get_default_manager(), get_policy().strict
    selection = _Selection(platform, selected, config, vllm_config)
    rankings = manager.rank_by_phase(OPERATOR, call=((), selection.needs))
    for parts in _combinations(
        {phase: selection.candidates(ranking, strict) for phase, ranking in rankings.items()}
    ):
        joined = selection.joined(parts)
        if joined is None:
            continue
        if selected is None and wants_live_attention(vllm_config):
            live = _Selection(platform, None, config, vllm_config)
            joined = live.made_live(parts) or joined
        backend, path = joined
        if backend.get_name() == AttentionBackendEnum.CUSTOM.name:
            register_backend(AttentionBackendEnum.CUSTOM, path)
        for phase, part in parts.items():
            manager.usage.note(part.impl, phase)
            note_choice(vllm_config, phase_name(OPERATOR, phase), (part.impl,))
        if len({part.impl for part in parts.values()}) == 1:
            logger.info("Attention backend: %s", next(iter(parts.values())).described)
        else:
            for phase, part in parts.items():
                logger.info("Attention backend for %s: %s", phase, part.described)
        return path
    asked = f" for --attention-backend {selected.name}" if selected is not None else ""
    raise NoAttentionBackend(
        f"No attention backend of vllm-fl can serve this model on the {platform.device_name} "
        f"platform{asked}.\n" + "\n".join(selection.refusals.values()) + "\n"
        f"What the model needs: {config}.\n"
        "Install a backend wheel that supports it, or change what the model needs or what was "
        "asked for."
    )


def _combinations(
    candidates: Mapping[str, Iterator[_Candidate]],
) -> Iterator[dict[str, _Candidate]]:
    """Yield phase -> candidate, those of the first phase varying slowest.

    Candidates of a single phase are asked for one by one.
    """
    first, *others = candidates
    rest = [list(candidates[phase]) for phase in others]
    for candidate in candidates[first]:
        for combination in itertools.product(*rest):
            yield dict(zip(candidates, (candidate, *combination), strict=True))


def choices_by_phase(order: Sequence[OpImpl], vllm_config: VllmConfig) -> list[str]:
    """Return the pairs of different implementations that can serve a phase each, for the tuner.

    Plain PyTorch is what others are compared with, and no part of a pair.
    """
    from vllm.config import set_current_vllm_config

    from vllm_fl.integration.phased_attention import disagreement

    backends = {}
    for impl in order:
        if impl.kind is BackendImplKind.REFERENCE:
            continue
        try:
            backends[impl.impl_id] = load_object(get_default_manager().function(impl)())
        except Exception as error:  # its own trial will say so, too
            logger.warning("%s of %s failed: %r", impl.impl_id, OPERATOR, error)
    phases = get_spec(OPERATOR).phases
    with set_current_vllm_config(vllm_config):  # it says how a cache is laid out
        return [
            join_choice(dict(zip(phases, pair, strict=True)))
            for pair in itertools.permutations(backends, 2)
            if not disagreement(*(backends[impl_id] for impl_id in pair))
        ]
