"""``vllm-fl profile MODEL``: the share of device time by operation and by origin."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_fl.cli.outputs import check_outputs
from vllm_fl.cli.tables import table
from vllm_fl.dispatch.discovery import get_discovered_plugins
from vllm_fl.dispatch.errors import ConfigError

DESCRIPTION = "Say what a model's device time is spent on, and whose kernels run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, all but ``--json``, which every command has."""
    parser.epilog = (
        "Every other argument is vLLM's, as in: vllm-fl profile MODEL --enforce-eager "
        "--tensor-parallel-size 2. VLLM_PLUGINS='' profiles vLLM without vllm-fl. A folder with a "
        "config.json and no weights runs with random ones."
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model's folder or name")
    add("--batch", type=int, default=8, help="requests at a time; default: 8")
    add("--prompt-tokens", type=int, default=128, help="random tokens each; default: 128")
    add("--output-tokens", type=int, default=32, help="generated for each; default: 32")
    add("--top", type=int, default=15, help="operations to print; default: 15")
    add("--html", type=Path, metavar="FILE", help="write a page with charts, too")


def run(arguments: argparse.Namespace) -> tuple[str, int]:
    """Profile; progress and vLLM's own output go to standard error.

    Raises:
        ConfigError: vLLM or torch is missing, vLLM refuses the model or an argument, the workload
            cannot be had, or the page cannot be written.
    """
    for needed in ("torch", "vllm"):
        if find_spec(needed) is None:
            raise ConfigError(f"`vllm-fl profile` needs {needed}, which is not installed.")
    from vllm_fl.profiling import page, workload
    from vllm_fl.profiling.classify import patterns_of
    from vllm_fl.profiling.report import summarise, unit

    work = workload.Workload(arguments.batch, arguments.prompt_tokens, arguments.output_tokens)
    if arguments.html:
        check_outputs({"--html": arguments.html}, {})
    with _stdout_to_stderr():
        profile = workload.run(arguments.model, arguments.engine_arguments, work, _say)
    data = {
        "model": arguments.model,
        "engine_arguments": arguments.engine_arguments,
        "workload": vars(work),
        **profile.facts,
        "unit": unit(profile.facts["device_type"]),
        "phases": summarise(profile.phases, patterns_of(get_discovered_plugins())),
    }
    if arguments.html:
        arguments.html.write_text(page.render(data), encoding="utf-8")
        _say(f"written: {arguments.html}")
    return (json.dumps(data, indent=2) if arguments.json else _text(data, arguments.top)), 0


def _say(text: str) -> None:
    print(f"vllm-fl profile: {text}", file=sys.stderr, flush=True)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what this process and its children write to standard output to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _text(data: dict[str, Any], top: int) -> str:
    phases, work = data["phases"], data["workload"]
    head = [
        f"{data['model']} on {data['device']}: {work['batch']} requests of {work['prompt']} + "
        f"{work['output']} tokens, {data['dtype']}"
        + (", random weights" if data["random_weights"] else ""),
        f"Platform: {data['platform']}; compilation {data['compilation_mode']}, CUDA graphs "
        f"{data['cudagraph_mode']}, tensor parallel {data['tensor_parallel_size']}.",
        f"Attention: {', '.join(data['attention_backends']) or 'none'}.",
        *(
            f"{name}: {found['us'] / 1000:.2f} ms of {data['unit']} in {found['steps']} steps, "
            f"{found['triton_share']:.1%} of it compiled by Triton."
            for name, found in phases.items()
        ),
    ]
    origins = {row["origin"]: [row["origin"]] for row in phases["all"]["origins"]}
    for found in phases.values():
        shares = {row["origin"]: row["share"] for row in found["origins"]}
        for origin, row in origins.items():
            row.append(f"{shares.get(origin, 0.0):.1%}")
    shown = phases["all"]["operations"][:top]
    rows = [
        [row["op"], row["origin"], f"{row['share']:.1%}", f"{row['us'] / 1000:.2f}",
         str(row["calls"])]
        for row in shown
    ]  # fmt: skip
    return "\n".join(
        (
            *head,
            "",
            table([f"origin, share of {data['unit']}", *phases], list(origins.values())),
            "",
            table(["operation", "origin", "share", f"ms of {data['unit']}", "calls"], rows),
        )
    )
