"""The models: configurations from which vLLM builds them with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "attention_bias": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
BYTES = 2
"""Of a weight and of an entry of the KV cache: 16 bits."""


def write_model(name: str, layers: int | None, folder: Path) -> Path:
    """Write a model's config.json and return its folder; ``name`` may be a model's folder.

    Raises:
        ValueError: it is neither, or the layers of a folder's model are to be cut.
    """
    if name not in MODELS:
        if not (Path(name) / "config.json").is_file():
            raise ValueError(
                f"there is no model {name!r}: give {', '.join(MODELS)}, or a folder with a "
                "config.json"
            )
        if layers is not None:
            raise ValueError(f"--layers cuts {', '.join(MODELS)}; edit {name}/config.json instead")
        return Path(name)
    config = dict(MODELS[name])
    if layers is not None:
        config["num_hidden_layers"] = layers
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def _head_size(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _kv_heads(config: Mapping[str, Any]) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def weight_bytes(config: Mapping[str, Any]) -> int:
    """Return the size of the matrices of a model of Qwen3's form."""
    hidden, size = config["hidden_size"], _head_size(config)
    attention = 2 * hidden * size * (config["num_attention_heads"] + _kv_heads(config))
    if experts := config.get("num_experts"):
        mlp = experts * hidden * (3 * config["moe_intermediate_size"] + 1)
    else:
        mlp = 3 * hidden * config["intermediate_size"]
    vocabulary = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return BYTES * (config["num_hidden_layers"] * (attention + mlp) + vocabulary)


def token_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of a token in the KV cache."""
    return 2 * BYTES * config["num_hidden_layers"] * _kv_heads(config) * _head_size(config)
