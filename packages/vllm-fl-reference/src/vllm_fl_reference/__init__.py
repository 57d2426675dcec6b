"""Plain PyTorch implementations of the operators of vllm-fl, and the CPU platform for vLLM."""
