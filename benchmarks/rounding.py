"""How far bf16 alone moves the log-probabilities of a dense model of benchmarks/e2e.

    python -m benchmarks.rounding --model qwen3-8b      # about ten minutes on two cores

transformers' layers on the CPU, with weights like those of benchmarks/e2e, in bf16 and with the
same weights in fp32; one layer is in memory at a time. Where two engines of bf16 part by no more
than this, either may be right. Run from the top of the repository.
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from benchmarks.e2e.models import MODELS
from benchmarks.e2e.process import LOGPROBS
from benchmarks.e2e.weights import DEVIATION
from benchmarks.e2e.workloads import CHECK

DENSE = [name for name, config in MODELS.items() if "num_experts" not in config]
EXACT, ROUNDED = torch.float32, torch.bfloat16


def normal(*shape: int) -> torch.Tensor:
    """Return a random matrix, in bf16."""
    return torch.empty(shape, dtype=ROUNDED).normal_(0.0, DEVIATION)


@torch.no_grad()
def errors(name: str) -> torch.Tensor:
    """Return by how much the likeliest tokens' log-probabilities differ, at every position."""
    torch.manual_seed(0)
    config = Qwen3Config(**MODELS[name], attn_implementation="sdpa")
    prompts = torch.tensor(CHECK.prompts(config.vocab_size))
    table = normal(config.vocab_size, config.hidden_size)
    hidden = {dtype: torch.nn.functional.embedding(prompts, table.to(dtype))
              for dtype in (EXACT, ROUNDED)}  # fmt: skip
    head = table if config.tie_word_embeddings else normal(*table.shape)
    positions = torch.arange(prompts.shape[1])[None]
    angles = {d: Qwen3RotaryEmbedding(config)(hidden[d], positions) for d in hidden}
    for number in range(config.num_hidden_layers):
        layer = Qwen3DecoderLayer(config, number).to(ROUNDED)
        for parameter in layer.parameters():
            if parameter.dim() > 1:  # norms stay ones
                parameter.normal_(0.0, DEVIATION)
        for dtype in (ROUNDED, EXACT):
            hidden[dtype] = layer.to(dtype)(hidden[dtype], position_embeddings=angles[dtype])
        print(f"layer {number + 1} of {config.num_hidden_layers}", file=sys.stderr)
    norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
    found = []
    for number in range(prompts.shape[0]):
        exact, rounded = (
            torch.log_softmax((norm.to(d)(hidden[d][number]) @ head.to(d).T).float(), dim=-1)
            for d in (EXACT, ROUNDED)
        )
        values, tokens = exact.topk(LOGPROBS)
        found.append((rounded.gather(-1, tokens) - values).abs().amax(dim=-1))
    return torch.cat(found)


def main() -> None:
    """Print the errors' median and largest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=DENSE, default=DENSE[0])
    name = parser.parse_args().model
    found = errors(name)
    print(
        f"{name}: of the {LOGPROBS} likeliest tokens' log-probabilities in bf16, the furthest off "
        f"is {found.median():.3f} from fp32 at the median position, {found.max():.3f} at most"
    )


if __name__ == "__main__":
    main()
