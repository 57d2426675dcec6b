"""vLLM's configuration for one attention layer."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from vllm_fl.testing.case import NotApplicable
from vllm_fl.testing.paged.scenario import Layer
from vllm_fl.testing.tensors import short

BLOCK_SIZES = (16, 32, 64, 128, 256)


def configure(backend: Any, layer: Layer) -> Any:
    """Return vLLM's configuration with the smallest usual block size that a backend accepts.

    Raises:
        NotApplicable: it accepts the layer with none; the reason is its own.
    """
    return _vllm_config(layer, _block_size(backend, layer))


def _block_size(backend: Any, layer: Layer) -> int:
    """Return the smallest usual block size with which the backend accepts the layer.

    Raises:
        NotApplicable: it accepts it with none.
    """
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    problems: list[str] = []
    any_config = _vllm_config(layer, BLOCK_SIZES[0])  # some backends look at it, as in vLLM
    for block_size in BLOCK_SIZES:
        wanted = AttentionSelectorConfig(
            head_size=layer.head_size,
            dtype=layer.dtype,
            kv_cache_dtype="auto",
            block_size=block_size,
            has_sink=layer.sinks,
            has_sliding_window=layer.window is not None,
        )
        with set_current_vllm_config(any_config):
            found = backend.validate_configuration(
                device_capability=current_platform.get_device_capability(), **wanted._asdict()
            )
        if not found:
            return block_size
        problems = problems or found
    raise NotApplicable("refused", "; ".join(problems))


def _vllm_config(layer: Layer, block_size: int) -> Any:
    from vllm.config import CacheConfig, ModelConfig, VllmConfig

    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": layer.heads * layer.head_size,
        "head_dim": layer.head_size,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        config = ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype=short(layer.dtype),
            max_model_len=4096,
            enforce_eager=True,
        )
    return VllmConfig(model_config=config, cache_config=CacheConfig(block_size=block_size))
