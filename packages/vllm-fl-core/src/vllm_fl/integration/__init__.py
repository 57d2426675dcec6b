"""The vLLM side: platform, layers, attention selection, and what runs inside the workers."""
