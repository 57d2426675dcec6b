"""Write small random models whose heads NPUs take, into a folder given on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers as tf

COMMON = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    # a sliding window in every layer
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig(**COMMON, sliding_window=24)),
    # expert groups with a bias, a shared expert, rotary over half of each head
    "glm4_moe": (tf.Glm4MoeForCausalLM, tf.Glm4MoeConfig(
        **COMMON, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=3,
        moe_intermediate_size=48, n_shared_experts=1, first_k_dense_replace=1,
        routed_scaling_factor=1.5, partial_rotary_factor=0.5, use_qk_norm=True)),
    # top-k softmax over experts
    "qwen3_moe": (tf.Qwen3MoeForCausalLM, tf.Qwen3MoeConfig(
        **COMMON, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=48,
        norm_topk_prob=True)),
}  # fmt: skip


@torch.no_grad()
def main() -> None:
    for name, (model_class, config) in MODELS.items():
        torch.manual_seed(0)
        model = model_class(config).float().eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # sharper attention, so that a fault shows in the tokens
            elif "norm" in parameter_name.lower():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        config.architectures = [model_class.__name__]
        model.save_pretrained(Path(sys.argv[1]) / name)


if __name__ == "__main__":
    main()
