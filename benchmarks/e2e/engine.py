"""One engine in a process of its own: commands come in, answers go out.

    python -m benchmarks.e2e.engine DESCRIPTOR < COMMANDS

Each is a JSON object a line. Standard output is vLLM's to write on, so answers go to a file
descriptor that is named. Commands: {"start": arguments of LLM} and {"run": [[token ids, ...], ...],
"new_tokens": n, "logprobs": k or null}. The end of the input ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from typing import Any

WHEELS = ("vllm", "torch", "triton", "transformers", "flag-gems")


def versions() -> dict[str, str]:
    """Return the versions of what decides about speed, and of this project's wheels."""
    installed = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return {
        name: version
        for name, version in sorted(installed.items())
        if name in WHEELS or name.startswith("vllm-fl")
    }


def start(arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Build the engine; return it with what it consists of."""
    import torch
    from vllm import LLM
    from vllm.platforms import current_platform

    began = time.perf_counter()
    llm = LLM(**arguments)
    seconds = time.perf_counter() - began
    config = llm.llm_engine.vllm_config
    dispatched = {}
    if "vllm_fl" in config.additional_config:  # what vllm-fl hands to the workers
        from vllm_fl.dispatch.state import current_config
        from vllm_fl.integration.custom_ops import LAYERS, decision

        decided = {op: decision(op) for op in LAYERS}
        table = llm.collective_rpc("fl_operator_table")[0]
        dispatched = {
            row["op"]: row["implementation"]
            for row in table
            if decided.get(row["op"], current_config().oot_decision(row["op"]))
        }
    compilation = config.compilation_config
    platform = type(current_platform)
    return llm, {
        "engine_seconds": seconds,
        "engine_arguments": arguments,
        "platform": f"{platform.__module__}.{platform.__qualname__}",
        "device": current_platform.get_device_name(),
        "cuda": torch.version.cuda,
        "dispatched": dispatched,
        "custom_ops": compilation.custom_ops,
        "compilation_mode": str(compilation.mode),
        "cudagraph_mode": str(compilation.cudagraph_mode),
        "versions": versions(),
    }


def generate(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Run one batch, greedily; return its seconds and tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=command["new_tokens"],
        detokenize=False,
        logprobs=command["logprobs"],
    )
    prompts = [{"prompt_token_ids": ids} for ids in command["run"]]
    began = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    answer: dict[str, Any] = {
        "seconds": seconds,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }
    if command["logprobs"]:
        answer["logprobs"] = [
            [{token: entry.logprob for token, entry in step.items()} for step in steps]
            for steps in (output.outputs[0].logprobs for output in outputs)
        ]
    return answer


def main() -> None:
    """Obey."""
    llm = None
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for line in sys.stdin:
            command = json.loads(line)
            if "start" in command:
                llm, answer = start(command["start"])
            else:
                answer = generate(llm, command)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
