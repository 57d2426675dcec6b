"""Checks that attention implementations share: what they cannot do, a layer or step must not ask.

vLLM asks a backend's class in ``validate_configuration``; what it does not ask there is refused
here, when a backend is selected, a layer is built, a step is described or a layer is called.
``who`` is the subject of the error's sentence, as in "the attention of Acme".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionImpl,
        CommonAttentionMetadata,
    )

WRAPPING = frozenset({"VoxtralRealtimeGeneration"})
"""Models that make an attention class out of one of vLLM's, and take no other.

Their encoder's is made by vLLM's ``create_whisper_attention_backend_with_block_pooling``.
"""


def refuse(who: str, asked: Mapping[str, bool]) -> None:
    """Raise for the first of these that is asked for.

    Raises:
        NotImplementedError: "<who> does not support <what>".
    """
    for what, is_asked in asked.items():
        if is_asked:
            raise NotImplementedError(f"{who} does not support {what}")


def context_parallel_problems(
    backend: type[AttentionBackend], vllm_config: VllmConfig
) -> list[str]:
    """Return what a backend's layers lack for the context parallelism of the configuration.

    vLLM's selector asks about that of prefill, and of decode in 0.33 alone; for the rest vLLM asks
    the layers when all are built, in ``check_attention_cp_compatibility``.
    """
    parallel = vllm_config.parallel_config
    decode = parallel.decode_context_parallel_size
    if decode * parallel.prefill_context_parallel_size == 1:
        return []
    impl = backend.get_impl_cls()
    interleave = parallel.cp_kv_cache_interleave_size
    problems = {
        f"decode_context_parallel_size={decode} not supported": decode > 1
        and not (impl.supports_dcp and impl.can_return_lse_for_decode),
        f"cp_kv_cache_interleave_size={interleave} with speculative decoding not supported": (
            interleave > 1
            and vllm_config.speculative_config is not None
            and not impl.supports_mtp_with_cp_non_trivial_interleave_size
        ),
    }
    return [problem for problem, is_one in problems.items() if is_one]


def wrapping_problems(backend: type[AttentionBackend], architectures: Iterable[str]) -> list[str]:
    """Return why the code of a model of these architectures does not take a backend's class."""
    if any(cls.__module__.startswith("vllm.v1.attention.backends.") for cls in backend.__mro__):
        return []
    return [
        f"{name} takes vLLM's own attention backends alone"
        for name in architectures
        if name in WRAPPING
    ]


def check_layer(
    who: str,
    backend: type[AttentionBackend],
    impl: AttentionImpl[Any],
    attn_type: str,
    kv_cache_dtype: str,
    unknown: Mapping[str, object],
) -> None:
    """Check what every layer says about itself.

    Args:
        who: the subject of the error.
        backend: whose class attributes and ``supports_attn_type`` say what is supported.
        impl: the layer's implementation, which knows how its context is distributed.
        attn_type: the layer's.
        kv_cache_dtype: the layer's.
        unknown: the keyword arguments that the implementation has no parameter for.

    Raises:
        NotImplementedError: one of them is not supported; the text names it.
    """
    refuse(
        who,
        {
            f"attention type {attn_type!r}": not backend.supports_attn_type(attn_type),
            f"kv_cache_dtype {kv_cache_dtype!r}": kv_cache_dtype
            not in backend.supported_kv_cache_dtypes,
            "context parallelism": impl.dcp_world_size > 1 or impl.pcp_world_size > 1,
            **{f"{name}={value!r}": True for name, value in unknown.items()},
        },
    )


def check_per_head(num_heads: int, **values: Sized | None) -> None:
    """Check that each of these that is given has one entry a query head.

    Raises:
        ValueError: one has not.
    """
    for name, value in values.items():
        if value is not None and len(value) != num_heads:
            raise ValueError(f"{name} must have {num_heads} entries, got {len(value)}")


def check_step(who: str, common: CommonAttentionMetadata) -> None:
    """Check what vLLM says about a step.

    Raises:
        NotImplementedError: bidirectional multimodal ranges or reference sliding windows.
    """
    refuse(
        who,
        {
            "bidirectional attention over multimodal tokens": common.mm_req_doc_ranges is not None,
            # Not in every version of vLLM.
            "reference sliding window attention (R-SWA)": getattr(common, "rswa_prefix_lens", None)
            is not None,
        },
    )


def check_output(who: str, *scales: object) -> None:
    """Check that no scale of a quantised output is given.

    Raises:
        NotImplementedError: one is.
    """
    refuse(who, {"quantised output": any(scale is not None for scale in scales)})


def check_blocks(found: int, expected: int) -> None:
    """Check that a layer's cache has the blocks that the step's metadata was built for.

    Raises:
        ValueError: it has others.
    """
    if found != expected:
        raise ValueError(
            f"the cache has blocks of {found} tokens, its metadata was built for {expected}"
        )
