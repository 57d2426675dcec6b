"""Names that profilers show on NVIDIA GPUs, and what they are taken for."""

from __future__ import annotations

import pytest

from vllm_fl.dispatch.discovery import get_discovered_plugins
from vllm_fl.profiling.classify import Kernel, classify, patterns_of

FA3 = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
    "CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<"
    "cute::C<128>, cute::C<176>, cute::C<128> >, 128, cutlass::bfloat16_t, float, cutlass::arch::"
    "Sm90, true, false, false, true> > > >(flash::Params)"
)
FA3_COMBINE = (
    "void cutlass::device_kernel<flash::enable_sm80_or_later<flash::FlashAttnFwdCombine<cute::tuple"
    "<cute::C<8>, cute::C<128> >, 6, 256, 1, true, cutlass::bfloat16_t, float, cutlass::arch::Sm90>"
    " > >(flash::FlashAttnFwdCombine::Params)"
)
FA2 = (
    "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false, "
    "cutlass::bfloat16_t>, false, true, false, true, true, false, true, false>(flash::Flash_fwd_"
    "params)"
)
CUTLASS = (
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, "
    "int>, cutlass::gemm::collective::CollectiveMma<void> > >(Params)"
)
GEMV = (
    "void gemvNSP_kernel<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 1, 32, 4, 1024>"
    "(cublasGemvParamsEx<int>)"
)
TOPK = (
    "void vllm::moe::topkGating<8, 128, 4, 16, 32, int, __nv_bfloat16, (vllm::moe::ScoringFunc)0>"
    "(__nv_bfloat16 const*, bool const*, float*, int, int*, int*, int, int, int, bool)"
)
FUSED_NORM = (
    "std::enable_if<((8)>(0))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type vllm::"
    "fused_add_rms_norm_kernel<c10::BFloat16, 8, true>(c10::BFloat16*, long, c10::BFloat16*)"
)
NAMES = {
    FA3: ("attention", "FlashAttention"),
    FA3_COMBINE: ("attention", "FlashAttention"),
    FA2: ("attention", "FlashAttention"),
    "void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int)": (
        "attention", "FlashAttention"
    ),
    "nvjet_tst_128x64_64x10_2x1_v_bz_TNT": ("matrix product", "cuBLAS"),
    "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNN": ("matrix product", "cuBLAS"),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_"
    "k_off_kernel__5x_cublas": ("matrix product", "cuBLAS"),
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>"
    "(cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8::Params)": (
        "matrix product", "cuBLAS"
    ),
    "ampere_sgemm_32x32_sliced1x4_tn": ("matrix product", "cuBLAS"),
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(int)": (
        "matrix product", "cuBLAS"
    ),
    GEMV: ("matrix product", "cuBLAS"),
    CUTLASS: ("matrix product", "CUTLASS"),
    "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*, float, int)": (
        "rms_norm", "vLLM CUDA"
    ),
    FUSED_NORM: ("rms_norm", "vLLM CUDA"),
    "void vllm::act_and_mul_kernel<c10::BFloat16, __nv_bfloat162>(c10::BFloat16*)": (
        "gated activation", "vLLM CUDA"
    ),
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)": (
        "rotary_embedding", "vLLM CUDA"
    ),
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>(int)": (
        "reshape_and_cache_flash", "vLLM CUDA"
    ),
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)": (
        "communication between GPUs", "vLLM CUDA"
    ),
    TOPK: ("topk_softmax", "vLLM CUDA"),
    "void vllm::moe::grouped_topk_fused_small_expert_count_kernel<float, float, int>(float*)": (
        "grouped_topk", "vLLM CUDA"
    ),
    "void vllm::moe::moe_align_block_size_small_batch_expert_kernel<int, 256>(int*)": (
        "moe_align_block_size", "vLLM CUDA"
    ),
    "void vllm::moe::count_and_sort_expert_tokens_kernel<int>(int const*)": (
        "moe_align_block_size", "vLLM CUDA"
    ),
    "void vllm::moe::moe_sum_vec_kernel<c10::BFloat16, 8>(c10::BFloat16*)": (
        "moe_sum", "vLLM CUDA"
    ),
    "void vllm::gather_and_maybe_dequant_cache<c10::Half, 1>(c10::Half*)": (
        "vllm::gather_and_maybe_dequant_cache", "vLLM CUDA"
    ),
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": (
        "communication between GPUs", "NCCL"
    ),
    "void at::native::index_elementwise_kernel<128, 4>(long)": (
        "at::native::index_elementwise_kernel", "PyTorch"
    ),
    "Memcpy DtoD (Device -> Device)": ("copy of memory", "runtime"),
    "vllm::unified_attention_with_output": ("vllm::unified_attention_with_output", "vLLM"),
    "_my_kernel": ("_my_kernel", "other"),
}  # fmt: skip


@pytest.fixture(scope="module")
def patterns():
    return patterns_of(get_discovered_plugins())


@pytest.mark.parametrize("name", NAMES)
def test_names_of_compiled_kernels(name, patterns):
    assert classify(name, patterns, {}) == Kernel(*NAMES[name], triton=False)


@pytest.mark.parametrize(
    ("name", "module", "op", "origin"),
    [
        ("fused_moe_kernel", "vllm.model_executor.layers.fused_moe.experts.triton_moe",
         "fused_experts", "vLLM Triton"),
        ("kernel_unified_attention", "vllm.v1.attention.ops.triton_unified_attention",
         "attention", "vLLM Triton"),
        ("_topk_topp_kernel", "vllm.v1.sample.ops.topk_topp_triton", "sampling", "vLLM Triton"),
        ("eagle_step", "vllm.v1.spec_decode.utils", "eagle_step", "vLLM Triton"),
    ],
)  # fmt: skip
def test_triton_kernels_of_vllm(name, module, op, origin, patterns):
    assert classify(name, patterns, {name: [module]}) == Kernel(op, origin, True)
