"""Run prompts in stock vLLM, in a process of its own, one engine after the other.

On the command line a JSON list of jobs: {"engine": arguments of LLM, "batches": [[token ids, ...],
...], "new_tokens": n}. The last line of the output is "RESULT" and a list, for each job: {"tokens":
for each batch, each prompt's, "cached": of each prompt, the tokens whose keys were cached, "calls":
"operator implementation" -> calls, "attention": states of the Ascend attention's steps -> how
often, "platform": its class}.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any


def count_states(worker: Any) -> None:
    """Count the states of the attention's steps, in the worker."""
    from vllm_fl_ascend.attention import backend

    build = backend.AscendAttentionMetadataBuilder.build
    states: Counter[str] = Counter()

    def counted(self, *args, **kwargs):
        metadata = build(self, *args, **kwargs)
        if metadata is not None:
            states[metadata.state.name] += 1
        return metadata

    backend.AscendAttentionMetadataBuilder.build = counted
    worker.attention_states = states


def states(worker: Any) -> dict[str, int]:
    return dict(worker.attention_states)


def calls(llm: Any) -> Counter[str]:
    """The calls in this process so far, those of earlier engines among them."""
    rows = llm.collective_rpc("fl_operator_table")[0]
    return Counter({f"{row['op']} {row['implementation']}": row["calls"] for row in rows})


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    llm = LLM(**job["engine"])
    llm.collective_rpc("fl_count_calls")
    before = calls(llm)
    llm.collective_rpc(count_states)
    sampling = SamplingParams(
        temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False
    )
    tokens, cached = [], []
    for batch in job["batches"]:
        prompts = [{"prompt_token_ids": ids} for ids in batch]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
        cached.append([output.num_cached_tokens for output in outputs])
    result = {
        "tokens": tokens,
        "cached": cached,
        "calls": calls(llm) - before,
        "attention": llm.collective_rpc(states)[0],
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__name__}",
    }
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return result


def main() -> None:
    print("RESULT" + json.dumps([run(job) for job in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
