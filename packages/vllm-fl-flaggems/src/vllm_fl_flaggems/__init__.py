"""The default operators of vllm-fl: Triton kernels for any device that has a Triton compiler."""
