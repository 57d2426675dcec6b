"""What runs once before serving, so that no kernel is compiled while a request waits.

vLLM's own steps without requests, its dummy runs, do for most operators: a backend says in which
ranges of token counts the same variants run (:meth:`Backend.warmup_tokens`), and one count of each
is enough. They leave attention out, for want of metadata. So an attention implementation may have

    def warm_up(self, kv_cache, vllm_config, phases=PHASES): ...

which compiles what the steps of these phases need. It is called for each layer, with the layer's
own cache, and neither reads nor writes any of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import discovery
from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.logging import get_logger

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

logger = get_logger("vllm_fl.integration")


def warm_up(vllm_config: VllmConfig, model_runner: Any, profiled: bool) -> None:
    """Warm up attention and operators; for a loaded model whose caches there are.

    Args:
        vllm_config: vLLM's configuration.
        model_runner: vLLM's, which has the model.
        profiled: whether it has run the most tokens of a step already.
    """
    from vllm.config import CUDAGraphMode

    layers = warm_up_attention(vllm_config)
    sizes = dummy_runs(vllm_config, model_runner.get_model(), profiled)
    for size in sizes:
        model_runner._dummy_run(size, cudagraph_runtime_mode=CUDAGraphMode.NONE, skip_eplb=True)
    if layers or sizes:
        logger.info("Warmed up: attention of %d layers; steps of %s tokens", layers, sizes)


def warm_up_attention(vllm_config: VllmConfig) -> int:
    """Let the implementations of attention warm up; return for how many layers."""
    import torch

    called = 0
    with torch.inference_mode():
        for layer in vllm_config.compilation_config.static_forward_context.values():
            impl: Any = getattr(layer, "impl", None)
            if hasattr(impl, "warm_up") and layer.kv_cache.numel():
                impl.warm_up(layer.kv_cache, vllm_config)
                called += 1
    return called


def dummy_runs(vllm_config: VllmConfig, model: torch.nn.Module, profiled: bool) -> list[int]:
    """Return the token counts to run so that each range which a backend names has had one.

    vLLM has run the most tokens of a step if it has profiled memory. It will run each size that it
    captures, unless it captures steps of pure decode alone, and leaves out the larger ones.
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
            ranges += record.backend.warmup_tokens(most, shapes)
    return missing_counts(ranges, done)


def missing_counts(ranges: Iterable[range], done: Collection[int]) -> list[int]:
    """Return the fewest counts that, with those that are done, leave no range without one."""
    chosen: list[int] = []
    for counts in sorted(ranges, key=lambda counts: counts.stop):
        if counts and not any(count in counts for count in (*done, *chosen)):
            chosen.append(counts[-1])
    return chosen
