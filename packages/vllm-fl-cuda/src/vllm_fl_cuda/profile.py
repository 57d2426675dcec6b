"""Names of kernels on NVIDIA GPUs as CUPTI shows them, for ``vllm-fl profile``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

VLLM, CUBLAS, CUTLASS = "vLLM CUDA", "cuBLAS", "CUTLASS"
FLASH_ATTENTION, FLASHINFER, NCCL = "FlashAttention", "FlashInfer", "NCCL"

_GEMM = "matrix product"

KERNELS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        # FlashAttention 3, 2, and the kernels around them.
        "*flash::FlashAttn*": ("attention", FLASH_ATTENTION),
        "*flash::flash_fwd_*": ("attention", FLASH_ATTENTION),
        "*flash::prepare_varlen_num_blocks*": ("attention", FLASH_ATTENTION),
        "*flashinfer::*": ("", FLASHINFER),
        "*flashinfer::*Prefill*": ("attention", FLASHINFER),
        "*flashinfer::*Decode*": ("attention", FLASHINFER),
        "*flashinfer::*PersistentVariableLengthMerge*": ("attention", FLASHINFER),
        # vLLM's libraries.
        "*vllm::*(*": ("", VLLM),
        "*vllm::rms_norm_kernel<*": ("rms_norm", VLLM),
        "*vllm::fused_add_rms_norm_kernel<*": ("rms_norm", VLLM),
        "*vllm::act_and_mul_kernel<*": ("gated activation", VLLM),
        "*vllm::rotary_embedding_kernel<*": ("rotary_embedding", VLLM),
        "*vllm::reshape_and_cache_flash_kernel<*": ("reshape_and_cache_flash", VLLM),
        "*vllm::merge_attn_states_kernel<*": ("attention", VLLM),
        "*vllm::cross_device_reduce_*": ("communication between GPUs", VLLM),
        "*vllm::moe::topkGating*": ("topk_softmax", VLLM),
        "*vllm::moe::moeSoftmax*": ("topk_softmax", VLLM),
        "*vllm::moe::moeTopK*": ("topk_softmax", VLLM),
        "*vllm::moe::grouped_topk_*": ("grouped_topk", VLLM),
        "*vllm::moe::moe_align_block_size*": ("moe_align_block_size", VLLM),
        "*vllm::moe::count_and_sort_expert_tokens*": ("moe_align_block_size", VLLM),
        "*vllm::moe::moe_sum_*": ("moe_sum", VLLM),
        "*marlin::*": (_GEMM, VLLM),
        # vLLM's Triton kernels, which have their names to themselves.
        "triton:vllm.model_executor.layers.fused_moe.*": ("fused_experts", "vLLM Triton"),
        "triton:vllm.v1.attention.ops.*": ("attention", "vLLM Triton"),
        "triton:vllm.v1.sample.*": ("sampling", "vLLM Triton"),
        # cuBLAS and cuBLASLt.
        "nvjet_*": (_GEMM, CUBLAS),
        "sm[0-9]*_xmma_gemm_*": (_GEMM, CUBLAS),
        "sm[0-9]*_gemm_*": (_GEMM, CUBLAS),
        "ampere_*gemm_*": (_GEMM, CUBLAS),
        "volta_*gemm_*": (_GEMM, CUBLAS),
        "turing_*gemm_*": (_GEMM, CUBLAS),
        "cutlass_[0-9]*_*gemm_*": (_GEMM, CUBLAS),
        "*cutlass_[0-9]*_*tensorop_*": (_GEMM, CUBLAS),
        "*cublasLt::*": (_GEMM, CUBLAS),
        "*gemvx::kernel<*": (_GEMM, CUBLAS),
        "*gemv[NT]*_kernel*": (_GEMM, CUBLAS),
        "*gemmk1_kernel<*": (_GEMM, CUBLAS),
        "*gemmSN_*_kernel<*": (_GEMM, CUBLAS),
        "*gemv2[NT]_kernel<*": (_GEMM, CUBLAS),
        "*splitKreduce_kernel<*": (_GEMM, CUBLAS),
        # Kernels instantiated from CUTLASS that nothing above names.
        "*cutlass::*": (_GEMM, CUTLASS),
        "*deep_gemm::*": (_GEMM, "DeepGEMM"),
        "nccl*": ("communication between GPUs", NCCL),
        "*ncclDevKernel_*": ("communication between GPUs", NCCL),
        "*ncclSymk*": ("communication between GPUs", NCCL),
        "*cub::*": ("sorting and scanning", "CUB"),
    }
)
"""Glob over kernel names -> (what it computes, where it comes from)."""
