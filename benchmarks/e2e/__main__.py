"""vLLM with vllm-fl against vLLM without it: output tokens a second, start-up, greedy tokens.

    python -m benchmarks.e2e --smoke                      # about three minutes on one GPU
    python -m benchmarks.e2e --model qwen3-0.6b --model qwen3-8b --time-budget 9m --out FILE.json
    python -m benchmarks.e2e --model qwen3-30b-a3b --layers 24 --mode flagos --mode mix=FILE.yaml

Run from the top of the repository, with the wheels installed. A mode is a way to run vLLM:
``native`` is without vllm-fl (VLLM_PLUGINS=''), ``control`` the same once more, whose ratio says
how well the run can tell, ``null`` with vllm-fl and every layer left to vLLM, ``default`` with the
platform's defaults file, ``vendor`` with everything dispatched, vendors first, ``flagos`` with
everything on flagos alone, attention and experts included, ``flagos-gemm`` the same with matrix
products by flag_gems, and ``mix=FILE.yaml``, with any name before the =, with a configuration of
one's own. Weights are random, from fixed seeds, and equal in every mode. flag_gems tunes a product
anew for each power of two of rows: for ``flagos-gemm`` capture graphs of few sizes, --engine
'{"compilation_config": {"cudagraph_capture_sizes": [1, 8, 128]}}'.

The engines of a model start at the same time and stay alive together, as many as the memory holds.
After one run that is not timed they take turns, round after round, another one first in each, so
that what the machine does in the meantime meets all of them; those whose turn it is not wait for
input. A short workload is repeated within a turn. A ratio is taken within a round. With --restarts
the engines are then started anew, from warm caches, again at the same time.

--out is written after every step. A run that was ended, by --time-budget or otherwise, goes on from
there when it is given the same --out; modes and workloads may be added.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.e2e.measuring import Bench, Clock, OutOfTime, say
from benchmarks.e2e.memory import device_bytes, share
from benchmarks.e2e.models import MODELS, write_model
from benchmarks.e2e.modes import NATIVE, Mode
from benchmarks.e2e.process import LOGPROBS, EngineFailed
from benchmarks.e2e.results import Results, summary
from benchmarks.e2e.workloads import CHECK, SMOKE, WORKLOADS, Workload

DEFAULT_MODES = ("null", "default", "flagos")
RESULTS = Path(__file__).parents[1] / "results"


def duration(text: str) -> float:
    """Parse seconds, or minutes with an m.

    Raises:
        argparse.ArgumentTypeError: it has another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([ms]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90, 90s or 9m")
    return float(found[1]) * (60 if found[2] == "m" else 1)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.e2e", description=description, epilog=more,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--model", action="append", help=f"{', '.join(MODELS)}, or a model's folder")
    add("--layers", type=int, help="cut the models to so many layers")
    add("--mode", action="append", help=f"several times; default: {', '.join(DEFAULT_MODES)}")
    add("--baseline", default=NATIVE, help="the mode to compare with; default: native")
    add("--workload", action="append", type=Workload.parse, help="BATCHxPROMPTxOUTPUT")
    add("--rounds", type=int, default=7, help="timed runs of each; default: 7")
    add("--restarts", type=int, default=0, help="warm starts of each mode; default: 0")
    add("--live", type=int, help="engines alive at a time; default: what the memory holds")
    add("--time-budget", type=duration, help="end in time, as 90s or 9m; what is done is kept")
    add("--retry", action="store_true", help="try modes again that could not run")
    add("--out", type=Path, default=RESULTS / "e2e.json")
    add("--engine", type=json.loads, default={}, help="more arguments of LLM, as JSON")
    add("--smoke", action="store_true", help="one small model, short workloads, null alone")
    parsed = parser.parse_args(arguments)
    if parsed.smoke:
        parsed.mode = parsed.mode or ["null"]
        parsed.workload = parsed.workload or list(SMOKE)
    parsed.model = parsed.model or ["qwen3-0.6b"]
    parsed.mode = parsed.mode or list(DEFAULT_MODES)
    parsed.workload = parsed.workload or list(WORKLOADS)
    if parsed.rounds < 1 or parsed.restarts < 0:
        parser.error("--rounds is at least 1, --restarts at least 0")
    if parsed.live is not None and parsed.live < 2:
        parser.error("--live is at least 2: engines are compared that take turns")
    return parsed


def prepare(
    name: str, arguments: argparse.Namespace, results: Results, clock: Clock, folder: Path
) -> Bench:
    """Return the measurement of one model in every mode.

    Raises:
        ValueError: there is no such model or mode, or it does not fit, or other things are in the
            results.
    """
    model = write_model(name, arguments.layers, folder)
    config = json.loads((model / "config.json").read_text())
    modes = [Mode.parse(mode, folder) for mode in (arguments.baseline, *arguments.mode)]
    modes = list({mode.name: mode for mode in modes}.values())
    workloads = arguments.workload
    live, cache = share(config, workloads, len(modes), device_bytes(), arguments.live)
    engine = {
        "model": str(model),
        "load_format": "random_normal",
        "worker_extension_cls": "benchmarks.e2e.weights.Extension",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": max(w.prompt + w.output for w in (*workloads, CHECK)) + 16,
        "max_num_seqs": max(w.batch for w in (*workloads, CHECK)),
        "max_logprobs": LOGPROBS,
        # With a size for the cache vLLM does not take the free memory, which the others share.
        "kv_cache_memory_bytes": cache,
        # Nor does this mean more than what must be free at the start.
        "gpu_memory_utilization": 0.1,
        "seed": 0,
        **arguments.engine,
    }
    logs = folder / f"logs-{model.name}"
    logs.mkdir()
    return Bench(
        key=model.name if arguments.layers is None else f"{model.name}, {arguments.layers} layers",
        engine_arguments=engine,
        vocabulary=config["vocab_size"],
        modes=modes,
        workloads=workloads,
        rounds=arguments.rounds,
        restarts=arguments.restarts,
        live=live,
        results=results,
        clock=clock,
        folder=logs,
        retry=arguments.retry,
    )


def main() -> int:
    """Measure, print the tables, write the JSON; return 1 if a mode could not run."""
    # Engines shall end with this process, whoever ends it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    arguments = parse_arguments()
    clock = Clock(arguments.time_budget)
    folder = Path(tempfile.mkdtemp(prefix="e2e-"))
    results = Results(arguments.out)
    keys = []
    try:
        for name in arguments.model:
            bench = prepare(name, arguments, results, clock, folder)
            keys.append(bench.key)
            try:
                bench.run()
            except EngineFailed:
                say(f"{bench.key} cannot be compared: its baseline does not run")
    except OutOfTime:
        say("the time is over; the same command goes on from what is written")
    except ValueError as error:
        sys.exit(str(error))
    results.save()
    for key in keys:
        print(summary(key, results.models[key]))
    say(f"written: {arguments.out}; logs: {folder}")
    return int(any(record.error for key in keys for record in results.models[key].values()))


if __name__ == "__main__":
    raise SystemExit(main())
