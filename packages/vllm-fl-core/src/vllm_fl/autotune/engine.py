"""One engine in a process of its own: commands come in on standard input, answers go out.

    python -m vllm_fl.autotune.engine DESCRIPTOR

Each is a JSON object a line. Standard output is vLLM's to write on, so answers go to the file
descriptor that is named: {"answer": ...}, or {"error": text}. Commands have a "do" and arguments,
which are those of the function of that name below.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from vllm_fl.dispatch.errors import VllmFLError
from vllm_fl.integration import startup

LOGPROBS = 5
"""Likeliest tokens of each step whose log-probabilities are compared."""

SECONDS_TO_END = 30
"""So long after the last command everything has ended, or is killed."""


def start(
    arguments: dict[str, Any], policy: dict[str, Any] | None, live_attention: bool
) -> tuple[Any, dict[str, Any]]:
    """Build vLLM's engine; return it with what it consists of.

    Args:
        arguments: of vLLM's ``LLM``.
        policy: the policy to build it under; None for the settings' own.
        live_attention: whether its attention shall be such that it can be chosen anew.
    """
    startup.check_platform("Tuning")
    from vllm import LLM
    from vllm.platforms import current_platform

    from vllm_fl.autotune.implementations import registered
    from vllm_fl.dispatch import SelectionPolicy, set_global_policy
    from vllm_fl.integration import handover
    from vllm_fl.integration.tuned import facts

    if policy is not None:
        set_global_policy(SelectionPolicy.from_dict(**policy))
    began = time.perf_counter()
    if live_attention:
        given = arguments.get("additional_config") or {}
        ours = {handover.KEY: {handover.LIVE_ATTENTION: True}}
        arguments = {**arguments, "additional_config": {**given, **ours}}
    llm = LLM(**arguments)
    seconds = time.perf_counter() - began
    config = llm.llm_engine.vllm_config
    if "vllm_fl" not in config.additional_config:
        raise RuntimeError(
            f"vLLM runs on {type(current_platform).__name__}, without vllm-fl: there is nothing to "
            "tune. `vllm-fl doctor` says why."
        )
    return llm, {
        "seconds": seconds,
        "facts": facts(config),
        "implementations": registered(),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "vocabulary": config.model_config.get_vocab_size(),
        "compilation_mode": str(config.compilation_config.mode),
        "graphs": current_platform.support_static_graph_mode(),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "policy": llm.collective_rpc("fl_policy")[0],
    }


def worker(llm: Any, method: str, arguments: list[Any]) -> Any:
    """Call a method of every worker; return the first one's answer."""
    return llm.collective_rpc(method, args=tuple(arguments))[0]


def serve(llm: Any, requests: list[dict[str, Any]]) -> dict[str, float]:
    """Serve requests as they arrive, greedily; return the metrics of the run.

    Raises:
        RuntimeError: a request ended with another number of tokens than asked for.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    waiting = deque(enumerate(requests))
    first: dict[int, float] = {}
    ended: dict[int, float] = {}
    tokens = 0
    began = time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1]["arrival"] <= time.perf_counter() - began:
            number, request = waiting.popleft()
            sampling = SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=request["output"],
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(number), {"prompt_token_ids": request["prompt"]}, sampling)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[0][1]["arrival"] - (time.perf_counter() - began)))
            continue
        for output in engine.step():
            now, number = time.perf_counter() - began, int(output.request_id)
            new = len(output.outputs[0].token_ids)
            tokens += new
            if new:
                first.setdefault(number, now)
            if output.finished:
                ended[number] = now
    wanted = sum(request["output"] for request in requests)
    if tokens != wanted:
        raise RuntimeError(f"{tokens} tokens were generated, not {wanted}")
    arrivals = [request["arrival"] for request in requests]
    return {
        "seconds": max(ended.values()),
        "output_tokens_per_second": tokens / max(ended.values()),
        "latency_seconds": median(end - arrivals[n] for n, end in ended.items()),
        "first_token_seconds": median(at - arrivals[n] for n, at in first.items()),
    }


def check(llm: Any, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    """Score prompts and continue them greedily; see ``agreement``."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=new_tokens,
        detokenize=False,
        logprobs=LOGPROBS,
        prompt_logprobs=0,
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [
        {
            "prompt": [
                step[token].logprob
                for step, token in zip(
                    output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True
                )
            ],
            "tokens": list(output.outputs[0].token_ids),
            "steps": [
                {token: entry.logprob for token, entry in step.items()}
                for step in output.outputs[0].logprobs
            ],
        }
        for output in outputs
    ]


COMMANDS: dict[str, Callable[..., Any]] = {"worker": worker, "serve": serve, "check": check}


def read_commands(commands: queue.SimpleQueue[str | None]) -> None:
    """Pass on commands; when there are no more, the tuner has ended, perhaps during one of them."""
    for line in sys.stdin:
        commands.put(line)
    commands.put(None)
    time.sleep(SECONDS_TO_END)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def watch(children: list[multiprocessing.process.BaseProcess]) -> None:
    """End this process with vLLM's own, whose end some of vLLM's calls wait for without end."""
    multiprocessing.connection.wait([child.sentinel for child in children])
    os._exit(1)


def main() -> None:
    """Obey until standard input ends."""
    llm = None
    commands: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=read_commands, args=(commands,), daemon=True).start()
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        while (line := commands.get()) is not None:
            command = json.loads(line)
            do = command.pop("do")
            try:
                if do == "start":
                    llm, answer = start(**command)
                    children = multiprocessing.active_children()
                    if children:
                        threading.Thread(target=watch, args=(children,), daemon=True).start()
                else:
                    answer = COMMANDS[do](llm, **command)
                reply: dict[str, Any] = {"answer": answer}
            except Exception as error:
                ours = isinstance(error, VllmFLError)
                reply = {"error": str(error) if ours else f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(reply) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
