"""vLLM's CUDA kernels as operators of vllm-fl, and the CUDA platform for vLLM."""
