"""Run one job in transformers, the yardstick, in a process of its own.

Job: {"model": folder, "dtype": torch dtype's name, "prompts": [token ids, ...], "new_tokens": n}.
Result: {"tokens": greedy continuation of each prompt, "prompt_logprobs": for each prompt the
log-probability of each of its tokens after the first, "embeddings": mean-free last hidden states
of encoder models (the first token's, normalised)}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM


def generate(model: torch.nn.Module, prompts: list[list[int]], new_tokens: int) -> dict[str, list]:
    tokens, logprobs = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        tokens.append(out[0, len(prompt) :].tolist())
        scores = model(ids).logits[0, :-1].float().log_softmax(-1)
        logprobs.append(scores.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return {"tokens": tokens, "prompt_logprobs": logprobs}


def embed(model: torch.nn.Module, prompts: list[list[int]]) -> dict[str, list]:
    states = [model(torch.tensor([prompt])).last_hidden_state[0, 0] for prompt in prompts]
    return {"embeddings": [torch.nn.functional.normalize(s, dim=0).tolist() for s in states]}


@torch.inference_mode()
def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    dtype = getattr(torch, job["dtype"])
    encoder = "CausalLM" not in AutoConfig.from_pretrained(job["model"]).architectures[0]
    loader = AutoModel if encoder else AutoModelForCausalLM
    model = loader.from_pretrained(job["model"], dtype=dtype, attn_implementation="eager").eval()
    result = (
        embed(model, job["prompts"])
        if encoder
        else generate(model, job["prompts"], job["new_tokens"])
    )
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
