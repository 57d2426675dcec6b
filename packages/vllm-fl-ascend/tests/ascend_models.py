"""Write models whose heads NPUs take, and what transformers generates with them in fp32.

On the command line: a folder for the random models, and the folder of the trained one. The folder
then holds ``expected.json``: name -> {"model": folder, "prompts": [token ids, ...], "tokens":
greedy continuation of each prompt, "margin": the smallest log-probability between the first and the
second token of a step}.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import torch
import transformers as tf
from tokenizers import Tokenizer

NEW_TOKENS = 24
LENGTHS = (1, 5, 33, 100, 150)
TEXT_LENGTHS = (1, 2, 7, 17, 33, 64, 127, 128, 150, 300)  # from one token to more than two blocks
COMMON = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    # a sliding window in every layer
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig(**COMMON, sliding_window=24)),
    # Expert groups with a bias, a shared expert, rotary over half of each head. No scaling factor:
    # in fp16 vLLM divides the shared expert by it, and compensates for that in DeepSeek's layers
    # alone, so that this model would be another one.
    "glm4_moe": (tf.Glm4MoeForCausalLM, tf.Glm4MoeConfig(
        **COMMON, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=3,
        moe_intermediate_size=48, n_shared_experts=1, first_k_dense_replace=1,
        routed_scaling_factor=1.0, partial_rotary_factor=0.5, use_qk_norm=True)),
    # top-k softmax over experts
    "qwen3_moe": (tf.Qwen3MoeForCausalLM, tf.Qwen3MoeConfig(
        **COMMON, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=48,
        norm_topk_prob=True)),
}  # fmt: skip


def make(name: str) -> tf.PreTrainedModel:
    model_class, config = MODELS[name]
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
    return model


def generate(model: tf.PreTrainedModel, prompts: list[list[int]]) -> tuple[list[list[int]], list]:
    """Continue prompts of one length; return the tokens and each prompt's margin."""
    ids = torch.tensor(prompts)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    scores = torch.stack(out.scores, dim=1).float().log_softmax(-1).topk(2, dim=-1).values
    margins = (scores[..., 0] - scores[..., 1]).amin(dim=1)
    return out.sequences[:, ids.shape[1] :].tolist(), margins.tolist()


def firm(model: tf.PreTrainedModel, candidates: list[list[list[int]]]) -> dict[str, object]:
    """Of each length's prompts take the one whose tokens are least in doubt.

    Two tokens may be nearly tied, and rounding to fp16 swaps them.
    """
    found = []
    for prompts in candidates:
        tokens, margins = generate(model, prompts)
        found.append(max(zip(margins, prompts, tokens, strict=True)))
    margins, prompts, tokens = zip(*found, strict=True)
    return {"prompts": prompts, "tokens": tokens, "margin": min(margins)}


def random_prompts() -> list[list[list[int]]]:
    draw = random.Random(3)
    return [
        [[draw.randrange(5, 500) for _ in range(length)] for _ in range(40)] for length in LENGTHS
    ]


def stretches(folder: str) -> list[list[list[int]]]:
    """Return stretches of a text, for a model that was trained on such."""
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    text = Path(folder, "README.md").read_text() + Path(argparse.__file__).read_text()
    ids = tokenizer.encode(text).ids
    return [[ids[97 * i : 97 * i + n] for i in range(8)] for n in TEXT_LENGTHS]


@torch.inference_mode()
def main() -> None:
    folder, trained = sys.argv[1:]
    load = tf.AutoModelForCausalLM.from_pretrained
    tiny = load(trained, dtype=torch.float32, attn_implementation="eager").eval()
    expected = {"tiny": {"model": trained, **firm(tiny, stretches(trained))}}
    for name in MODELS:
        path = f"{folder}/{name}"
        make(name).save_pretrained(path)
        model = load(path, dtype=torch.float32, attn_implementation="eager").eval()
        expected[name] = {"model": path, **firm(model, random_prompts())}
    Path(folder, "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main()
