"""Write small random models, one folder each, with the layers that real ones differ in."""

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
        # encoder only
        "bert": (tf.BertModel, tf.BertConfig(**COMMON)),
    }  # fmt: skip


@torch.no_grad()
def main() -> None:
    folder = Path(sys.argv[1])
    for name, (model_class, config) in configurations().items():
        torch.manual_seed(0)
        model = model_class(config).float().eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # sharper attention, so that a fault shows in the tokens
            elif "norm" in parameter_name.lower():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        config.architectures = [model_class.__name__]
        model.save_pretrained(folder / name)
        for file in TINY_MODEL.glob("tokenizer*"):  # vLLM wants one for embedding models
            shutil.copy(file, folder / name)


if __name__ == "__main__":
    main()
