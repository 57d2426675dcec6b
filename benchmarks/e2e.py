"""vLLM with vllm-fl against vLLM without it: output tokens a second, start-up, greedy tokens.

    python benchmarks/e2e.py --smoke                      # about three minutes on one GPU
    python benchmarks/e2e.py --model qwen3-0.6b --model qwen3-8b --rounds 2
    python benchmarks/e2e.py --model qwen3-30b-a3b --layers 24 --mode flagos --mode mix=FILE.yaml

A mode is a way to run vLLM: ``native`` is without vllm-fl (VLLM_PLUGINS=''), ``null`` with it and
every layer left to vLLM, ``default`` with the platform's defaults file, ``vendor`` with everything
dispatched, vendors first, ``flagos`` with everything on flagos alone, attention and experts
included, ``flagos-gemm`` the same with flag_gems running PyTorch's own operators, matrix products
among them, and ``mix=FILE.yaml``, with any name before the =, with a configuration of one's own.
Weights are random, from a fixed seed that is vLLM's own and equal in every mode.

Several engines are alive at a time (--live), the first of them of mode native, and take turns at
every repetition, so that what the machine does in the meantime meets all of them. Figures are
medians, ratios are taken within a group of engines that took turns. A round starts every engine
anew; the first start of a mode fills the compile cache, the later ones are warm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NATIVE = "native"
DEFAULT_MODES = ("null", "default", "vendor")

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "attention_bias": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Workload:
    """A batch of equal requests.

    Attributes:
        batch: how many.
        prompt: tokens of each prompt.
        output: tokens generated for each.
    """

    batch: int
    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Parse "BATCHxPROMPTxOUTPUT".

        Raises:
            argparse.ArgumentTypeError: it has another form.
        """
        parts = text.split("x")
        if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form BATCHxPROMPTxOUTPUT")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt}x{self.output}"

    @property
    def cached_tokens(self) -> int:
        """Tokens in the KV cache when all requests run at once."""
        return self.batch * (self.prompt + self.output + 32)

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return the prompts: the same in every process, no two with a common beginning."""
        state, prompts = 12345 + self.batch, []
        for _ in range(self.batch):
            ids = []
            for _ in range(self.prompt):
                state = (1103515245 * state + 12345) % 2**31
                ids.append((state >> 8) % vocabulary)
            prompts.append(ids)
        return prompts


WORKLOADS = (Workload(128, 512, 128), Workload(1, 32, 256), Workload(32, 4096, 16))
CHECK = Workload(8, 64, 32)
"""Run once an engine with log-probabilities, to compare what is generated."""
CHECK_LOGPROBS = 5


class EngineFailed(Exception):
    """An engine's process has ended; the text is the last that it wrote."""


class Engine:
    """An engine of one mode in a process of its own.

    Args:
        environ: what to set in its environment.
        folder: where its log and its answers go.
    """

    def __init__(self, environ: dict[str, str], folder: Path) -> None:
        folder.mkdir(parents=True)
        read, write = os.pipe()
        self._log = folder / "log"
        chosen = ("VLLM_FL_CONFIG", "USE_FLAGGEMS", "VLLM_PLUGINS")
        clean = {k: v for k, v in os.environ.items() if k not in chosen}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(HERE / "e2e_engine.py"), str(write)],
                env={**clean, **environ},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=(write,),
            )
        os.close(write)
        self._answers = os.fdopen(read)

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            EngineFailed: the process ended instead.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and the log says why
        # The engine's own processes may keep the pipe open when the one that is asked has ended.
        while not select.select([self._answers], [], [], 1.0)[0] and self._process.poll() is None:
            pass
        ready = select.select([self._answers], [], [], 0)[0]
        answer = self._answers.readline() if ready else ""
        if not answer:
            self.stop()
            raise EngineFailed(reason_in(self._log.read_text()))
        return json.loads(answer)

    def stop(self) -> None:
        """End the process, and with it the engine's own."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


def reason_in(log: str) -> str:
    """Return the lines of a log that say why: the first error with its text, and the end."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "Traceback" not in line]
    chosen = dict.fromkeys((*errors[:3], *lines[-3:]))
    return "\n".join(line[-400:] for line in chosen)


@dataclass
class Result:
    """What one mode did on one model.

    Attributes:
        mode: the mode.
        error: why it could not run; empty if it could.
        facts: what the engine consists of.
        startup_seconds: of each start, from the process's start to the first token.
        output_tokens_per_second: workload -> one figure a repetition.
        ratio: workload -> median over native's median in the same group.
        tokens: workload -> "equal to native", or where it first differs.
        repeatable: workload -> whether every repetition gave the same tokens.
        check: the comparison on the checked prompts, with log-probabilities.
    """

    mode: str
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    startup_seconds: list[float] = field(default_factory=list)
    output_tokens_per_second: dict[str, list[float]] = field(default_factory=dict)
    ratio: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    repeatable: dict[str, bool] = field(default_factory=dict)
    check: str = ""


def first_difference(ours: list[list[int]], theirs: list[list[int]]) -> tuple[int, int] | None:
    """Return (request, position) of the first token that differs, positions first; or None."""
    places = [
        (position, request)
        for request, (one, other) in enumerate(zip(ours, theirs, strict=True))
        for position, (a, b) in enumerate(zip(one, other, strict=True))
        if a != b
    ]
    if not places:
        return None
    position, request = min(places)
    return request, position


def describe_difference(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """Say where the tokens first differ, and how many requests do."""
    place = first_difference(ours, theirs)
    if place is None:
        return "equal to native"
    differing = sum(one != other for one, other in zip(ours, theirs, strict=True))
    return (
        f"{differing} of {len(ours)} requests differ from native, first request {place[0]} at "
        f"position {place[1]}: {ours[place[0]][place[1]]}, not {theirs[place[0]][place[1]]}"
    )


def compare_checked(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Compare two checks; see :data:`CHECK`.

    Log-probabilities are compared up to each request's first difference; beyond it the two
    continue different texts.
    """
    errors = []
    for mine, other, p, q in zip(
        ours["tokens"], theirs["tokens"], ours["logprobs"], theirs["logprobs"], strict=True
    ):
        for a, b, step, their_step in zip(mine, other, p, q, strict=True):
            if a != b:
                break
            errors.append(abs(step[str(a)] - their_step[str(b)]))
    text = describe_difference(ours["tokens"], theirs["tokens"])
    if errors:
        text += f"; log-probabilities before that differ by {max(errors):.4g} at most"
    place = first_difference(ours["tokens"], theirs["tokens"])
    if place is not None:
        request, position = place
        token = str(ours["tokens"][request][position])
        step = theirs["logprobs"][request][position]
        best = max(step.values())
        margin = f"{best - step[token]:.4g} below" if token in step else "not among the best of"
        text += f"; native gives our token a log-probability {margin} its own"
    return text


def write_model(name: str, layers: int | None, folder: Path) -> Path:
    """Write a model's config.json and return its folder; ``name`` may be a model's folder."""
    if name not in MODELS:
        return Path(name)
    config = dict(MODELS[name])
    if layers is not None:
        config["num_hidden_layers"] = layers
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def cache_bytes(config: dict[str, Any], workloads: Sequence[Workload]) -> int:
    """Return the KV cache that the largest workload needs, in 16 bits, and a tenth more."""
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = 2 * 2 * config["num_hidden_layers"] * heads * size
    return int(1.1 * token * max(w.cached_tokens for w in (*workloads, CHECK)))


def mode_environment(mode: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Return a mode's name and environment.

    Raises:
        ValueError: there is no such mode, or the file that it names does not exist.
    """
    if mode == NATIVE:
        return mode, {"VLLM_PLUGINS": ""}
    if mode == "default":
        return mode, {}
    name, given, file = mode.partition("=")
    if given:
        if not Path(file).is_file():
            raise ValueError(f"mode {mode!r}: there is no file {file!r}")
        return name, {"VLLM_FL_CONFIG": str(Path(file).resolve())}
    from vllm_fl.dispatch.ops import CATALOGUE

    # What is named must run: an operator that flagos lacks is an error, not another's work.
    flagos = {"op_backends": {op: ["flagos"] for op in CATALOGUE}}
    contents: dict[str, dict[str, Any]] = {
        "null": {"prefer": "vendor", "oot_whitelist": []},
        "vendor": {"prefer": "vendor"},
        "flagos": flagos,
        "flagos-gemm": flagos,
    }
    if mode not in contents:
        known = ", ".join((NATIVE, "default", *contents, "mix=FILE.yaml"))
        raise ValueError(f"there is no mode {mode!r}; the modes are {known}")
    path = folder / f"{mode}.yaml"
    path.write_text(json.dumps(contents[mode]))  # JSON is YAML
    environ = {"VLLM_FL_CONFIG": str(path)}
    return mode, {**environ, "USE_FLAGGEMS": "1"} if mode == "flagos-gemm" else environ


def groups(modes: Sequence[str], baseline: str, live: int) -> Iterator[list[str]]:
    """Divide the modes into groups of engines that are alive together."""
    others = [mode for mode in modes if mode != baseline]
    if live == 1:
        yield from ([mode] for mode in (baseline, *others))
        return
    for index in range(0, max(len(others), 1), live - 1):
        yield [baseline, *others[index : index + live - 1]]


@dataclass
class Bench:
    """The measurement of one model.

    Attributes:
        model: its folder.
        engine_arguments: of LLM.
        vocabulary: its size.
        environments: mode -> environment.
        baseline: the mode that the others are compared with.
        workloads: what is timed.
        repetitions: how often, for each start of an engine.
        folder: for logs.
    """

    model: Path
    engine_arguments: dict[str, Any]
    vocabulary: int
    environments: dict[str, dict[str, str]]
    baseline: str
    workloads: Sequence[Workload]
    repetitions: int
    folder: Path
    results: dict[str, Result] = field(default_factory=dict)
    _first: dict[str, dict[str, list[list[int]]]] = field(default_factory=dict)
    _checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    _starts: int = 0

    def run(self, rounds: int, live: int) -> dict[str, Result]:
        """Measure every mode and return the results."""
        for number in range(rounds):
            for group in groups(list(self.environments), self.baseline, live):
                # Who starts first in a group changes, in case that matters.
                self._run_group(group if number % 2 == 0 else group[::-1])
        self._compare()
        return self.results

    def _run_group(self, modes: list[str]) -> None:
        engines = {}
        try:
            for mode in modes:
                result = self.results.setdefault(mode, Result(mode))
                try:
                    engines[mode] = self._start(mode, result)
                except EngineFailed as error:
                    result.error = str(error)
                    say(f"{mode} cannot run:\n{error}")
            for workload in self.workloads:
                self._time(engines, workload)
        finally:
            for engine in engines.values():
                engine.stop()

    def _start(self, mode: str, result: Result) -> Engine:
        say(f"starting {mode} on {self.model.name}")
        self._starts += 1
        began = time.perf_counter()
        engine = Engine(self.environments[mode], self.folder / f"{self._starts}-{mode}")
        result.facts = engine.ask(start={**self.engine_arguments, "model": str(self.model)})
        checked = engine.ask(run=CHECK.prompts(self.vocabulary)[:1], new_tokens=1, logprobs=None)
        assert checked["tokens"]
        result.startup_seconds.append(time.perf_counter() - began)
        self._checks[mode] = engine.ask(
            run=CHECK.prompts(self.vocabulary), new_tokens=CHECK.output, logprobs=CHECK_LOGPROBS
        )
        layers = ", ".join(f"{op} -> {impl}" for op, impl in result.facts["dispatched"].items())
        say(f"{mode} started in {result.startup_seconds[-1]:.1f} s; dispatched: {layers or 'none'}")
        return engine

    def _time(self, engines: dict[str, Engine], workload: Workload) -> None:
        """Time one workload, the engines taking turns, after one turn each that is not timed."""
        prompts = workload.prompts(self.vocabulary)
        rates: dict[str, list[float]] = {mode: [] for mode in engines}
        for repetition in range(self.repetitions + 1):
            for mode in list(engines):
                try:
                    answer = engines[mode].ask(
                        run=prompts, new_tokens=workload.output, logprobs=None
                    )
                except EngineFailed as error:
                    self.results[mode].error = f"during {workload}: {error}"
                    say(f"{mode} failed during {workload}:\n{error}")
                    del engines[mode], rates[mode]
                    continue
                self._note_tokens(mode, workload, answer["tokens"])
                if repetition:
                    rates[mode].append(workload.batch * workload.output / answer["seconds"])
        for mode, figures in rates.items():
            result = self.results[mode]
            result.output_tokens_per_second.setdefault(str(workload), []).extend(figures)
            if self.baseline in rates:
                ratio = statistics.median(figures) / statistics.median(rates[self.baseline])
                result.ratio.setdefault(str(workload), []).append(ratio)
            say(f"{workload} {mode}: {statistics.median(figures):.1f} tokens/s")

    def _note_tokens(self, mode: str, workload: Workload, tokens: list[list[int]]) -> None:
        first = self._first.setdefault(mode, {}).setdefault(str(workload), tokens)
        repeatable = self.results[mode].repeatable
        repeatable[str(workload)] = repeatable.get(str(workload), True) and first == tokens

    def _compare(self) -> None:
        """Compare tokens, and take ratios between groups where engines were alone."""
        theirs = self._first.get(self.baseline, {})
        native = self.results[self.baseline].output_tokens_per_second
        for mode, result in self.results.items():
            if mode == self.baseline:
                continue
            for workload, tokens in self._first.get(mode, {}).items():
                if workload in theirs:
                    result.tokens[workload] = describe_difference(tokens, theirs[workload])
            for workload, figures in result.output_tokens_per_second.items():
                if workload not in result.ratio and native.get(workload):
                    ratio = statistics.median(figures) / statistics.median(native[workload])
                    result.ratio[workload] = [ratio]
            if mode in self._checks and self.baseline in self._checks:
                result.check = compare_checked(self._checks[mode], self._checks[self.baseline])


def say(text: str) -> None:
    """Print progress, with the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows in columns, the first row being the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    return "\n".join((lines[0], "  ".join("-" * width for width in widths), *lines[1:]))


def summary(model: str, results: dict[str, Result], workloads: Sequence[Workload]) -> str:
    """Return a model's results as text: medians, ratios in brackets, what could not run."""
    rows = [["mode", "start-up s", *map(str, workloads)]]
    notes = []
    for mode, result in results.items():
        row = [mode, " ".join(f"{seconds:.1f}" for seconds in result.startup_seconds) or "-"]
        for workload in map(str, workloads):
            figures = result.output_tokens_per_second.get(workload)
            ratio = result.ratio.get(workload)
            text = f"{statistics.median(figures):.1f}" if figures else "-"
            row.append(f"{text} ({statistics.median(ratio):.3f})" if ratio else text)
        rows.append(row)
        if result.error:
            notes.append(f"{mode} CANNOT RUN:\n  " + result.error.replace("\n", "\n  "))
        notes += [f"{mode}, {w}: {what}" for w, what in result.tokens.items()]
        notes += [
            f"{mode}, {w}: repetitions give different tokens"
            for w, same in result.repeatable.items()
            if not same
        ]
        if result.check:
            notes.append(f"{mode}, checked prompts: {result.check}")
    heading = f"{model}: output tokens/s (over the baseline), median"
    return "\n".join((heading, "", table(rows), "", *notes, ""))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=more, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", action="append", help=f"{', '.join(MODELS)}, or a model's folder")
    add("--layers", type=int, help="cut the models to so many layers")
    add("--mode", action="append", help=f"several times; default: {', '.join(DEFAULT_MODES)}")
    add("--baseline", default=NATIVE, help="the mode to compare with; default: native")
    add("--workload", action="append", type=Workload.parse, help="BATCHxPROMPTxOUTPUT")
    add("--repetitions", type=int, default=3, help="timed ones, for each start; default: 3")
    add("--rounds", type=int, default=1, help="starts of every engine; default: 1")
    add("--live", type=int, default=2, help="engines alive at a time; default: 2")
    add("--out", type=Path, default=HERE / "results" / "e2e.json")
    add("--engine", type=json.loads, default={}, help="more arguments of LLM, as JSON")
    add("--smoke", action="store_true", help="one small model, short workloads, null alone")
    parsed = parser.parse_args(arguments)
    if parsed.smoke:
        parsed.model = parsed.model or ["qwen3-0.6b"]
        parsed.mode = parsed.mode or ["null"]
        parsed.workload = parsed.workload or [Workload(32, 128, 32), Workload(1, 32, 64)]
    parsed.model = parsed.model or ["qwen3-0.6b"]
    parsed.mode = parsed.mode or list(DEFAULT_MODES)
    parsed.workload = parsed.workload or list(WORKLOADS)
    if min(parsed.live, parsed.repetitions, parsed.rounds) < 1:
        parser.error("--live, --repetitions and --rounds are at least 1")
    return parsed


def measure(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Result]:
    """Measure one model in every mode."""
    model = write_model(name, arguments.layers, folder)
    config = json.loads((model / "config.json").read_text())
    workloads = arguments.workload
    longest = max(w.prompt + w.output for w in (*workloads, CHECK))
    engine = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": longest + 16,
        "max_num_seqs": max(w.batch for w in (*workloads, CHECK)),
        "kv_cache_memory_bytes": cache_bytes(config, workloads),
        # With a size for the cache this is but what must be free at the start, others being alive.
        "gpu_memory_utilization": 0.1,
        "seed": 0,
        **arguments.engine,
    }
    modes = [mode_environment(mode, folder) for mode in (arguments.baseline, *arguments.mode)]
    logs = folder / f"logs-{model.name}"
    bench = Bench(
        model, engine, config["vocab_size"], dict(modes), arguments.baseline.partition("=")[0],
        workloads, arguments.repetitions, logs,
    )  # fmt: skip
    return bench.run(arguments.rounds, arguments.live)


def main() -> None:
    """Measure, print the tables, write the JSON; exit 1 if a mode could not run."""
    arguments = parse_arguments()
    everything: dict[str, Any] = {
        "command": sys.argv[1:],
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "models": {},
    }
    texts, failed = [], False
    folder = Path(tempfile.mkdtemp(prefix="e2e-"))
    for name in arguments.model:
        results = measure(name, arguments, folder)
        failed |= any(result.error for result in results.values())
        key = name if arguments.layers is None else f"{name}, {arguments.layers} layers"
        everything["models"][key] = {mode: asdict(result) for mode, result in results.items()}
        texts.append(summary(key, results, arguments.workload))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(everything, indent=1) + "\n")
        arguments.out.with_suffix(".txt").write_text("\n".join(texts))
        print(texts[-1])
    say(f"written: {arguments.out}; logs: {folder}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
