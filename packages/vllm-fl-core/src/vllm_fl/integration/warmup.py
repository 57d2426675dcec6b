"""What runs once before serving, so that no kernel is compiled while a request waits.

vLLM's own steps without requests, its dummy runs, do for most operators: a backend says in which
ranges of token counts the same variants run (:meth:`Backend.warmup_tokens`), and one count of each
is enough. They leave attention out, for want of metadata. So an attention implementation may have

    def warm_up(self, kv_cache, vllm_config, phases): ...

which compiles what the steps of these phases need. It is called for each layer, with the layer's
own cache, and neither reads nor writes any of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import discovery
from vllm_fl.dispatch.backend import Backend, ExpertsShape
from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.errors import RegistrationError
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.ops import PHASES
from vllm_fl.integration.lenient import lenient

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

logger = get_logger("vllm_fl.integration")

LATE = "its kernels may be compiled while a request waits"


def warm_up(vllm_config: VllmConfig, model_runner: Any, profiled: bool) -> None:
    """Warm up attention and operators; for a loaded model whose caches there are.

    Args:
        vllm_config: vLLM's configuration.
        model_runner: vLLM's, which has the model.
        profiled: whether it has run the most tokens of a step already.

    Raises:
        RegistrationError: a backend's method cannot be called, or answers what it must not.
        Exception: a backend's method fails, and the policy is strict.
    """
    from vllm.config import CUDAGraphMode

    layers = warm_up_attention(vllm_config)
    sizes = dummy_runs(vllm_config, model_runner.get_model(), profiled)
    for size in sizes:
        model_runner._dummy_run(size, cudagraph_runtime_mode=CUDAGraphMode.NONE, skip_eplb=True)
    if layers or sizes:
        logger.info("Warmed up: attention of %d layers; steps of %s tokens", layers, sizes)


def warm_up_attention(vllm_config: VllmConfig) -> int:
    """Let the implementations of attention warm up; return for how many layers one did.

    A class of which one fails is not asked for further layers.
    """
    import torch

    warmed = 0
    failed: set[type] = set()
    with torch.inference_mode():
        for layer in vllm_config.compilation_config.static_forward_context.values():
            able = [
                (i, p) for i, p in _serving(getattr(layer, "impl", None)) if hasattr(i, "warm_up")
            ]
            if not able or not layer.kv_cache.numel():
                continue
            done = 0
            for impl, phases in able:
                if type(impl) not in failed:
                    if _warm_up_impl(impl, layer.kv_cache, vllm_config, phases):
                        done += 1
                    else:
                        failed.add(type(impl))
            warmed += done > 0
    return warmed


def _serving(impl: Any, phases: Sequence[str] = PHASES) -> Iterator[tuple[Any, Sequence[str]]]:
    """Yield the implementations that serve a layer's steps, each with its phases."""
    from vllm_fl.integration.phased_attention import PhasedImpl

    if not isinstance(impl, PhasedImpl):
        yield impl, phases
        return
    for backend, part in impl.parts.items():
        served = tuple(phase for phase in impl.phases_of(backend) if phase in phases)
        if served:
            yield from _serving(part, served)


def _warm_up_impl(impl: Any, kv_cache: Any, vllm_config: VllmConfig, phases: Sequence[str]) -> bool:
    """Let one implementation warm up; return whether it did."""
    who = f"{type(impl).__module__}.{type(impl).__qualname__}"
    arguments = (kv_cache, vllm_config, phases)
    problem = _misfit(impl.warm_up, arguments)
    if problem:
        raise RegistrationError(
            f"{who}: warm_up {problem}. Wanted: warm_up(self, kv_cache, vllm_config, phases)."
        )
    with lenient(f"warm_up of {who} failed, so {LATE}"):
        impl.warm_up(*arguments)
        return True
    return False


def _misfit(method: Any, arguments: tuple[object, ...]) -> str:
    """Say why a method cannot be called with some arguments; "" if it can."""
    if not callable(method):
        return f"is {method!r}, which cannot be called"
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return ""  # a compiled builtin without a signature: only a call can tell
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return f"takes {signature} after self: {error}"
    return ""


def dummy_runs(vllm_config: VllmConfig, model: torch.nn.Module, profiled: bool) -> list[int]:
    """Return the token counts to run so that each range which a backend names has had one.

    vLLM has run the most tokens of a step if it has profiled memory. It will run each size that it
    captures, unless it captures steps of pure decode alone, and leaves out the larger ones.

    Raises:
        RegistrationError: a backend names other things than ranges within the tokens of a step.
    """
    from vllm.config import CUDAGraphMode

    from vllm_fl.integration.moe import expert_shapes

    most = vllm_config.scheduler_config.max_num_batched_tokens
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    done = {most} if profiled else set()
    if mode is not None and mode.mixed_mode() != CUDAGraphMode.NONE:
        done.update(compilation.cudagraph_capture_sizes or ())
    shapes = expert_shapes(model)
    bound = get_default_manager().bound()
    ranges: list[range] = []
    for record in discovery.get_discovered_plugins():
        if record.backend is not None and not bound.isdisjoint(record.registered):
            ranges += _ranges_of(record.name, record.backend, most, shapes)
    return missing_counts(ranges, done)


def _ranges_of(
    name: str, backend: Backend, most: int, shapes: Sequence[ExpertsShape]
) -> list[range]:
    """Return the ranges that a backend names; none if it fails."""
    with lenient(f"warmup_tokens of backend {name} failed, so {LATE}"):
        answer: Any = backend.warmup_tokens(most, shapes)
        wrong = answer
        if isinstance(answer, Iterable) and not isinstance(answer, (str, range)):
            ranges = list(answer)
            wrong = [counts for counts in ranges if not _within(counts, most)]
            if not wrong:
                return ranges
        raise RegistrationError(
            f"Backend {name}: warmup_tokens returned {wrong!r}. "
            f"Allowed: an iterable of ranges of token counts within 1..{most}."
        )
    return []


def _within(counts: object, most: int) -> bool:
    """Whether it is a range of token counts that steps may have."""
    return isinstance(counts, range) and all(
        1 <= end <= most for end in (*counts[:1], *counts[-1:])
    )


def missing_counts(ranges: Iterable[range], done: Collection[int]) -> list[int]:
    """Return the fewest counts that, with those that are done, leave no range without one."""
    chosen: list[int] = []
    for counts in sorted(ranges, key=lambda counts: counts.stop):
        if counts and not any(count in counts for count in (*done, *chosen)):
            chosen.append(counts[-1])
    return chosen
