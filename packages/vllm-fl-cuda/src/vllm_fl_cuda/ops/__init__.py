"""vLLM's CUDA kernels under the operators' signatures; importing this loads them."""

from vllm.platforms import current_platform

current_platform.import_kernels()
