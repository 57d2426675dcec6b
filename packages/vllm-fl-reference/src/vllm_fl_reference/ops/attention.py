"""The operator ``attention_backend``: which class vLLM gets. Imports nothing heavy."""

from __future__ import annotations


def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """Return the paged attention in plain PyTorch; its class refuses MLA and sparse models.

    Source: the contract of ``attention_backend`` in the operator catalogue.
    """
    return "vllm_fl_reference.attention.backend:ReferenceAttentionBackend"
