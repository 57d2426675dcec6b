"""The operator ``attention_backend``: FlashAttention, where vLLM itself takes it first."""

from __future__ import annotations

from vllm_fl_cuda import nvml


def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """Return vLLM's FlashAttention, version 3 on Hopper and 2 on others, as vLLM decides.

    Source: ``vllm.platforms.cuda``, ``_get_backend_priorities``.
    """
    return "vllm.v1.attention.backends.flash_attn:FlashAttentionBackend"


def attention_backend_supports(use_mla: bool = False, use_sparse: bool = False) -> bool | str:
    """Whether FlashAttention is what vLLM takes first for such a model on this GPU."""
    if use_mla or use_sparse:
        return "FlashAttention serves neither latent nor sparse attention"
    arch = nvml.arch()
    if arch is not None and arch // 10 == 10:
        return "vLLM prefers FlashInfer on GPUs of compute capability 10"
    return True
