"""The profiled run: one batch of equal requests through vLLM's engine, step by step."""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_fl.dispatch.errors import ConfigError, VllmFLError
from vllm_fl.integration import startup
from vllm_fl.integration.platform import WORKER_EXTENSION

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


@dataclass(frozen=True)
class Workload:
    """A batch of equal requests of random tokens.

    Attributes:
        batch: how many.
        prompt: tokens of each prompt.
        output: tokens generated for each, at least two: the first belongs to the prefill.
    """

    batch: int
    prompt: int
    output: int

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("prompt", 1), ("output", 2)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"The workload's {name} is {getattr(self, name)}, at least {least} is needed."
                )

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return the prompts, the same every time."""
        draw = random.Random(0)
        return [[draw.randrange(vocabulary) for _ in range(self.prompt)] for _ in range(self.batch)]


@dataclass
class Phase:
    """What was recorded while a phase ran.

    Attributes:
        steps: of the engine.
        seconds: by the clock, the profiler's own work included.
        records: one of :meth:`vllm_fl.profiling.recorder.Recorder.stop` a worker.
    """

    steps: int = 0
    seconds: float = 0.0
    records: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Profile:
    """A profiled run.

    Attributes:
        phases: "prefill", until every request has its first token, and "decode".
        facts: what ran.
    """

    phases: dict[str, Phase]
    facts: dict[str, Any]


def run(
    model: str, arguments: Sequence[str], workload: Workload, say: Callable[[str], None]
) -> Profile:
    """Build the engine, run the workload once to warm up and once under the profiler.

    The engine runs in this process, so that a phase ends exactly where a step does; workers of
    tensor parallelism have their own.

    Args:
        model: folder or name of the model.
        arguments: vLLM's engine arguments as on its command line.
        workload: what to run.
        say: is told about the progress.

    Raises:
        ConfigError: vLLM cannot be imported, finds no device, or refuses the model or an argument.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    defaults: dict[str, Any] = {
        "max_model_len": workload.prompt + workload.output,
        "max_num_seqs": workload.batch,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "worker_extension_cls": WORKER_EXTENSION,
        **({"load_format": "dummy"} if has_no_weights(model) else {}),
    }
    say("loading vLLM")
    engine = _engine(model, arguments, defaults, say)
    try:
        prompts = workload.prompts(engine.model_config.get_vocab_size())
        say("warming up")
        for _ in _steps(engine, prompts, workload.output):
            pass
        say("profiling")
        phases = _profiled(engine, prompts, workload.output)
        facts = _facts(engine)
    finally:
        engine.engine_core.shutdown()
    return Profile(phases, facts)


def has_no_weights(model: str) -> bool:
    """Whether ``model`` is a folder that holds a configuration and no weights.

    Raises:
        ConfigError: it is a folder without a configuration.
    """
    folder = Path(model)
    if not folder.is_dir():
        return False
    if not (folder / "config.json").is_file():
        raise ConfigError(f"The folder {model!r} has no config.json, so it is no model's.")
    return not any(True for pattern in _WEIGHTS for _ in folder.glob(pattern))


def _engine(
    model: str, arguments: Sequence[str], defaults: dict[str, Any], say: Callable[[str], None]
) -> Any:
    startup.check_platform("`vllm-fl profile`")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = FlexibleArgumentParser(
        prog="vllm-fl profile",
        usage="vllm-fl profile MODEL [options] [engine arguments of vLLM]",
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(**defaults)
    parsed = parser.parse_args(["--model", model, *arguments])
    if parsed.worker_extension_cls != WORKER_EXTENSION:
        raise ConfigError(
            f"--worker-extension-cls is {parsed.worker_extension_cls!r}: the profiler itself needs "
            "this argument; leave it out."
        )
    say("starting the engine")
    try:
        return LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed))
    except VllmFLError:
        raise
    except (ImportError, OSError, ValueError) as error:
        refusal = startup.refusal(error)
        told = ConfigError(f"vLLM refuses {model!r}: {refusal.reason}.")
        raise refusal.ours or told from error


def _facts(engine: Any) -> dict[str, Any]:
    from vllm.platforms import current_platform

    config = engine.vllm_config
    platform = type(current_platform)
    facts = {
        "platform": f"{platform.__module__}.{platform.__qualname__}",
        "device": current_platform.get_device_name() or current_platform.device_type,
        "device_type": current_platform.device_type,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "compilation_mode": str(getattr(config.compilation_config.mode, "name", None)),
        "cudagraph_mode": str(getattr(config.compilation_config.cudagraph_mode, "name", None)),
        "attention_backends": engine.collective_rpc("fl_attention_backends")[0],
        "random_weights": config.load_config.load_format == "dummy",
        "dispatched": {},
    }
    if "vllm_fl" in config.additional_config:  # what the platform of vllm-fl hands to the workers
        table = engine.collective_rpc("fl_operator_table")[0]
        facts["dispatched"] = {row["op"]: row["implementation"] for row in table if row["chosen"]}
    return facts


def _profiled(engine: Any, prompts: list[list[int]], output: int) -> dict[str, Phase]:
    prefill, decode = Phase(), Phase()
    phase = prefill
    began = _start(engine)
    for all_have_begun in _steps(engine, prompts, output):
        phase.steps += 1
        if phase is prefill and all_have_begun:
            _stop(engine, phase, began)
            phase = decode
            began = _start(engine)
    _stop(engine, phase, began)
    return {"prefill": prefill, "decode": decode}


def _start(engine: Any) -> float:
    engine.collective_rpc("fl_profile_start")
    return time.perf_counter()


def _stop(engine: Any, phase: Phase, began: float) -> None:
    phase.seconds = time.perf_counter() - began
    phase.records = engine.collective_rpc("fl_profile_stop")


def _steps(engine: Any, prompts: list[list[int]], output: int) -> Iterator[bool]:
    """Run the requests; after each step yield whether every one of them has a token."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output, detokenize=False)
    for number, ids in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    begun: set[str] = set()
    while engine.has_unfinished_requests():
        begun.update(answer.request_id for answer in engine.step() if answer.outputs[0].token_ids)
        yield len(begun) == len(prompts)
