"""Generate text with stock vLLM through vllm-fl, and show which implementation ran each operator.

python examples/offline_inference.py --prompt "The with statement" --prompt "A list is"
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from vllm import LLM, SamplingParams

from vllm_fl.cli.tables import table

TINY_MODEL = Path(__file__).parent / "tiny-qwen3"
PROMPTS = ("The with statement", "A function definition", "The import statement")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(TINY_MODEL), help="a model folder or name")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Run the example."""
    arguments = parse_arguments()
    llm = LLM(model=arguments.model, tensor_parallel_size=arguments.tensor_parallel_size)
    llm.collective_rpc("fl_count_calls")
    sampling = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    prompts = arguments.prompt or list(PROMPTS)
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling)
    seconds = time.perf_counter() - started

    for output in outputs:
        print(f"\nPrompt:    {output.prompt!r}\nGenerated: {output.outputs[0].text!r}")
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\n{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s\n")

    rows = llm.collective_rpc("fl_operator_table")[0]
    columns = ("op", "implementation", "wheel", "version", "calls")
    print(table(columns, [[str(row[column]) for column in columns] for row in rows]))


if __name__ == "__main__":
    main()
