"""Attention on NPUs: masks, what a step needs, and vLLM's backend class."""
