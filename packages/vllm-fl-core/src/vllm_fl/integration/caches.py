"""What vLLM keeps for the whole process of what was chosen for one engine.

A second engine of the process may have another policy or other settings, which its compile-cache
key says: its layers must be chosen anew. Those of an engine that lives belong to its model.
"""

from __future__ import annotations


def forget() -> None:
    """Let vLLM ask for attention backends and build layers anew. Call it before a model is built.

    These are all its caches whose content depends on dispatch.
    """
    from vllm.model_executor.layers import activation, rotary_embedding
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()
    rotary_embedding._ROPE_DICT.clear()
    activation._ACTIVATION_AND_MUL_REGISTRY._dict.clear()
