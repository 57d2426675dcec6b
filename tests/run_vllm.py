"""Run one job in stock vLLM, in a process of its own: read a JSON file, write a JSON file.

Job: {"engine": arguments of LLM, "batches": [[token ids, ...], ...], "sampling": arguments of
SamplingParams, "embed": true for an embedding model, "policy": a policy to set in this process,
"live": for each batch, a policy to set in the live engine before it, or null}.
Result: {"outputs": for each batch, each prompt's {"tokens", "logprobs", "prompt_logprobs",
"cached"}, "operators", "differences": the tables of each worker, "platform": the platform's class,
"bound": for each policy, what is bound or why it was refused}.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any


def value_of(logprobs: dict[int, Any] | None, token: int) -> float | None:
    return None if not logprobs else logprobs[token].logprob


def output_of(output: Any) -> dict[str, Any]:
    best = output.outputs[0]
    ids = output.prompt_token_ids
    return {
        "tokens": list(best.token_ids),
        "logprobs": [
            value_of(step, token)
            for step, token in zip(best.logprobs or (), best.token_ids, strict=False)
        ],
        "prompt_logprobs": [
            value_of(step, token)
            for step, token in zip(output.prompt_logprobs or (), ids, strict=False)
        ],
        "cached": output.num_cached_tokens,
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    from vllm_fl.dispatch import SelectionPolicy, set_global_policy

    if job.get("policy"):
        set_global_policy(SelectionPolicy.from_dict(**job["policy"]))
    llm = LLM(**job["engine"])
    llm.collective_rpc("fl_count_calls")
    results, bound = [], []
    for batch, live in itertools.zip_longest(job["batches"], job.get("live") or ()):
        if live is not None:
            try:
                bound.append(llm.collective_rpc("fl_set_policy", args=(live,))[0]["bound"])
            except Exception as error:
                bound.append(str(error))
        prompts = [{"prompt_token_ids": ids} for ids in batch]
        if job.get("embed"):
            results.append([o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False)])
        else:
            sampling = SamplingParams(**job["sampling"])
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            results.append([output_of(output) for output in outputs])
    result = {
        "outputs": results,
        "bound": bound,
        "operators": llm.collective_rpc("fl_operator_table"),
        "differences": llm.collective_rpc("fl_differences"),
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__name__}",
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
