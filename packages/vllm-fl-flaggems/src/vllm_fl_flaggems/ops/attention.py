"""The operator ``attention_backend``: which class vLLM gets. Imports nothing heavy."""

from __future__ import annotations

from vllm_fl.dispatch.state import current_device
from vllm_fl_flaggems.availability import interpreted


def supports(use_mla: bool = False, use_sparse: bool = False) -> object:
    """Say whether there are kernels for such a model on the device that vLLM runs on."""
    if use_mla or use_sparse:
        return "there are no Triton kernels for latent or sparse attention here"
    device = current_device().device
    if device is not None and device.name == "cpu" and not interpreted():
        return "vLLM runs on the CPU here; Triton compiles for accelerators"
    return True


def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """Return the paged attention by Triton kernels."""
    return "vllm_fl_flaggems.attention.backend:AttentionFLBackend"
