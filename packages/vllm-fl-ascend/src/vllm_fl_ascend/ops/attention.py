"""The operator ``attention_backend``. Imports nothing heavy beyond torch_npu."""

from __future__ import annotations


def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """Return attention by ``npu_fused_infer_attention_score`` over vLLM's paged cache."""
    return "vllm_fl_ascend.attention.backend:AscendAttentionBackend"


def attention_backend_supports(use_mla: bool = False, use_sparse: bool = False) -> bool | str:
    """Whether the model's attention is neither latent nor sparse."""
    if use_mla or use_sparse:
        return "the Ascend attention serves neither latent nor sparse attention"
    return True
