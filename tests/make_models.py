"""Write small random models, one folder each, with the layers that real ones differ in.

python make_models.py FOLDER [NAME ...]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import transformers as tf

TINY_MODEL = Path(__file__).parent.parent / "examples" / "tiny-qwen3"
COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {**COMMON, "num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def configurations() -> dict[str, tuple[type, tf.PretrainedConfig]]:
    """Return name -> (model class, its configuration)."""
    return {
        # Gemma's norm (1 + weight), GeGLU with tanh, logits soft cap, alternate sliding windows
        "gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config(
            **GQA, head_dim=48, sliding_window=32, attn_logit_softcapping=5.0,
            query_pre_attn_scalar=48, hidden_activation="gelu_pytorch_tanh")),
        # interleaved rotary over half of each head
        "glm": (tf.GlmForCausalLM, tf.GlmConfig(**GQA, head_dim=32, partial_rotary_factor=0.5)),
        # neox rotary over a quarter of each head, multi-head attention
        "stablelm": (tf.StableLmForCausalLM, tf.StableLmConfig(
            **COMMON, num_key_value_heads=4, partial_rotary_factor=0.25)),
        # a sliding window in every layer, multi-query attention
        "mistral": (tf.MistralForCausalLM, tf.MistralConfig(
            **COMMON, num_key_value_heads=1, sliding_window=24)),
        # a rotary embedding that differs from the plain one in its cache alone
        "llama3": (tf.LlamaForCausalLM, tf.LlamaConfig(**GQA, rope_parameters=LLAMA3_ROPE)),
        # top-k softmax over experts, renormalised; a number of them that is no power of two
        "qwen3_moe": (tf.Qwen3MoeForCausalLM, tf.Qwen3MoeConfig(
            **GQA, head_dim=32, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=48,
            norm_topk_prob=True)),
        # weights that are not renormalised, experts shared by all tokens behind a gate
        "qwen2_moe": (tf.Qwen2MoeForCausalLM, tf.Qwen2MoeConfig(
            **GQA, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48,
            shared_expert_intermediate_size=64, norm_topk_prob=False)),
        # few large experts
        "mixtral": (tf.MixtralForCausalLM, tf.MixtralConfig(
            **GQA, num_local_experts=4, num_experts_per_tok=2)),
        # sigmoid scores with a bias, expert groups, a shared expert, scaled weights
        "glm4_moe": (tf.Glm4MoeForCausalLM, tf.Glm4MoeConfig(
            **GQA, head_dim=32, n_routed_experts=16, n_group=4, topk_group=2,
            num_experts_per_tok=3, moe_intermediate_size=48, n_shared_experts=1,
            first_k_dense_replace=1, routed_scaling_factor=1.5, partial_rotary_factor=0.5,
            use_qk_norm=True)),
        # encoder only
        "bert": (tf.BertModel, tf.BertConfig(**COMMON)),
    }  # fmt: skip


@torch.no_grad()
def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for name, (model_class, config) in configurations().items():
        if names and name not in names:
            continue
        torch.manual_seed(0)
        model = model_class(config).float().eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # sharper attention, so that a fault shows in the tokens
            elif "norm" in parameter_name.lower():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
        config.architectures = [model_class.__name__]
        model.save_pretrained(folder / name)
        for file in TINY_MODEL.glob("tokenizer*"):  # vLLM wants one for embedding models
            shutil.copy(file, folder / name)


if __name__ == "__main__":
    main()
