"""vLLM's CUDA platform with the dispatch of vllm-fl."""

from __future__ import annotations

from vllm.platforms.cuda import CudaPlatform

from vllm_fl.integration.platform import PlatformFL


class CudaPlatformFL(PlatformFL, CudaPlatform):
    """NVIDIA GPUs. Everything that is not dispatched is vLLM's, ``is_cuda()`` included."""

    vllm_has_attention = True
