"""Whole engines: vLLM with vllm-fl against vLLM without it. See __main__.py."""
