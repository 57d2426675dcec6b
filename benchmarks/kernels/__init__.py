"""Times the Triton kernels of vllm-fl-flaggems on a GPU beside what else computes the same."""
