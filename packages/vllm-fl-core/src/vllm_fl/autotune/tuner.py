"""Tuning from beginning to end: evidence, search, confirmation, result."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from vllm_fl.autotune import implementations
from vllm_fl.autotune import result as results
from vllm_fl.autotune import workload as workloads
from vllm_fl.autotune.agreement import MEAN_TOLERANCE, Continuation
from vllm_fl.autotune.arena import CHECK_LENGTHS, CHECK_NEW_TOKENS, Costs, EngineArena, Limits
from vllm_fl.autotune.decisions import is_refuted, keep, kept
from vllm_fl.autotune.evidence import Evidence
from vllm_fl.autotune.gathering import gather, policies
from vllm_fl.autotune.measuring import (
    LOOKS,
    PAIRS,
    OutOfTime,
    confirm,
    engine_starts,
    run_trial,
)
from vllm_fl.autotune.objective import Objective
from vllm_fl.autotune.options import Options, Progress
from vllm_fl.autotune.search import Search, best, failed_alone, make_sampler, ranked, tried
from vllm_fl.autotune.space import Configuration, Space, needs_restart, orders
from vllm_fl.autotune.studies import claim, open_storage, open_study, study_name
from vllm_fl.autotune.summary import summary
from vllm_fl.autotune.supervisor import TrialFailed
from vllm_fl.autotune.verification import (
    SETTING_VARIABLES,
    Verification,
    is_platform_s_own,
    verify,
)
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.state import current_config, use_tuned_file
from vllm_fl.dispatch.tuned import installed_versions

CONFIRMED = 3
"""So many of the best configurations are confirmed, until one wins."""
SEARCH_SHARE = 0.7
"""The part of the time budget that evidence and search may take."""
_MODEL_TAKES = re.compile(r"greater than the derived max_model_len \(\w+=(\d+)")
"""How vLLM refuses a length; it looks before it builds anything."""


@dataclass
class Tuner:
    """One process's work on a study.

    Args:
        options: what to tune.
        tell: called with what happens, for people.
        progress: called after each trial.
    """

    options: Options
    tell: Callable[[str], None] = lambda text: None
    progress: Callable[[Progress], None] = lambda progress: None

    def __post_init__(self) -> None:
        self.workload = workloads.load(self.options.workload)
        self.objective = Objective.parse(self.options.objective)
        use_tuned_file(None)  # what is tuned is what runs without a tuned configuration
        self.settings = current_config()
        for op_name in self.options.keep:
            get_spec(op_name)
        results.check_switches(self.settings)
        self._began = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-fl-autotune-"))
        longest = max(self.workload.longest, max(CHECK_LENGTHS) + CHECK_NEW_TOKENS)
        self.arguments = {
            "model": self.options.model,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_model_len": longest + 1,
            "max_num_seqs": self.workload.concurrency,
            "seed": 0,
            **self.options.engine,
        }
        if self.arguments["max_model_len"] < longest:
            raise ConfigError(
                f"max_model_len is {self.arguments['max_model_len']}; the workload and the "
                f"checking set need {longest}."
            )
        limits = Limits(run=self.options.trial_seconds)
        self.arena = EngineArena(self.arguments, None, self._folder, limits, tell=self.tell)

    def tune(self) -> dict[str, Any]:
        """Work until the study is decided, and return everything that is known about it.

        KeyboardInterrupt and the end of the time end the work; the study keeps what is done.

        Raises:
            ConfigError: the study exists and is not to be resumed, or belongs to other versions or
                implementations.
            TrialFailed: the default itself cannot run; the text says where its log is.
        """
        interrupted, undecided = False, ""
        with open_storage(self.options.storage) as self._storage:
            study = self._open()
            try:
                try:
                    self._work(study)
                except KeyboardInterrupt:
                    interrupted = True
                    self.tell("interrupted; --resume continues")
                except OutOfTime as end:
                    undecided = str(end)
                    self.tell(undecided)
                except TrialFailed as failure:
                    where = f"What the engines printed is in {self._folder}."
                    raise TrialFailed(f"{failure}\n{where}") from failure
            finally:
                self.arena.stop()
                self._note_costs(study, self.arena.costs)
            shutil.rmtree(self._folder)
            return summary(study, self.options.storage, interrupted, undecided)

    def _open(self) -> optuna.Study:
        # Why a trial failed is kept with it; Optuna would print a traceback, after Ctrl-C, too.
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        content = {
            "model": self.options.model,
            "workload": self.workload.to_dict(),
            "objective": str(self.objective),
            "engine": dict(self.arguments),
            "keep": sorted(self.options.keep),
            "least_share": self.options.least_share,
            "tolerance": self.options.tolerance,
            "settings": {key: repr(value.value) for key, value in self.settings.values.items()},
        }
        sampler = make_sampler(self.options.seed)
        name, resume = study_name(content), self.options.resume
        if name not in optuna.get_all_study_names(self._storage):
            if resume:
                self.tell("--resume: the storage holds no such study; a new one begins")
        elif not resume:  # what failed before it found anything is begun again
            resume = _holds_nothing(optuna.load_study(study_name=name, storage=self._storage))
        study = open_study(name, self._storage, sampler, resume)
        facts = study.user_attrs.get("facts")
        if facts is not None:  # what is decided needs no engine, which would know the rest
            _check_same(facts["facts"], {"versions": installed_versions()})
            implementations.check_same(facts["implementations"], implementations.registered())
        return study

    def _work(self, study: optuna.Study) -> None:
        if self._is_decided(study, self.options.trials):
            return
        evidence = self._evidence(study)
        space = evidence.space()
        if not space.choices:
            reason = f"there is nothing to choose{self._kept_layers()}"
            study.set_user_attr(
                "result", {"winner": None, "reason": reason, "confirmations": [], "trials": 0}
            )
            return
        self._search(study, evidence)
        while not self._is_decided(study):
            with claim(study, self._storage, "confirmation") as mine:
                if mine:
                    over = len(tried(study))  # what another process tries meanwhile is decided next
                    more = {"left_out": self._left_out(study, space), "trials": over}
                    study.set_user_attr("result", {**self._decide(study, space), **more})
            if not mine:
                self._wait("another process confirms the best")

    def _kept_layers(self) -> str:
        from vllm_fl.integration.custom_ops import LAYERS, decision

        kept = {op: decision(op) for op in LAYERS}
        reasons = dict.fromkeys(decision.reason for decision in kept.values() if not decision)
        if not reasons:
            return ""
        return (
            f"; vLLM keeps its own layers ({'; '.join(reasons)}): tune with VLLM_FL_CONFIG or "
            "VLLM_FL_OOT_WHITELIST so that they are dispatched"
        )

    def _wait(self, why: str) -> None:
        """Wait a moment for another process.

        Raises:
            OutOfTime: the time is used up.
        """
        self.tell(why)
        if self._over():
            raise OutOfTime(f"the time was used up while {why}")
        time.sleep(2)

    def _is_decided(self, study: optuna.Study, trials: int = 0) -> bool:
        """Whether there is a result of all trials, and of at least ``trials`` if there may be."""
        result = study.user_attrs.get("result")
        if result is None or result["trials"] != len(tried(study)):
            return False
        space = Evidence.from_dict(study.user_attrs["evidence"]).space()
        return not space.choices or result["trials"] >= min(trials, space.size)

    # -- evidence

    def _evidence(self, study: optuna.Study) -> Evidence:
        while "evidence" not in study.user_attrs:
            with claim(study, self._storage, "evidence") as mine:
                if mine and "evidence" not in study.user_attrs:  # it may have come just before
                    self._gather(study)
            if not mine:
                self._wait("another process gathers the evidence")
        evidence = Evidence.from_dict(study.user_attrs["evidence"])
        facts = study.user_attrs["facts"]
        self.arena.arguments = self._search_arguments(facts["graphs"])
        self.arena.policy_of, self.arena.live = policies(evidence, facts["policy"]), evidence.live
        if self.arena.reference is None:  # the evidence is another process's
            self._start_like(facts, evidence.space().default)
            outputs = study.user_attrs["reference_outputs"]
            self.arena.reference = [Continuation.from_dict(content) for content in outputs]
        return evidence

    def _gather(self, study: optuna.Study) -> None:
        self.arena.arguments = {**self.arguments, "enforce_eager": True}
        try:
            facts = self.arena.start()
        except TrialFailed as failure:
            takes = _MODEL_TAKES.search(str(failure))
            if takes is None:
                raise
            raise ConfigError(self._too_long(int(takes[1]))) from failure
        self._prepare(facts)
        self.tell("recording the operators that the workload calls")
        options = self.options
        evidence, reference = gather(self.arena, options.least_share, options.keep, self.tell)
        if facts["graphs"]:
            self.arena.stop()  # trials have an engine with graphs
        study.set_user_attr("facts", facts)
        study.set_user_attr("workload", self.workload.summary)
        study.set_user_attr("objective", str(self.objective))
        study.set_user_attr("reference", reference)
        assert self.arena.reference is not None
        study.set_user_attr("reference_outputs", [vars(c) for c in self.arena.reference])
        study.set_user_attr("evidence", evidence.to_dict())

    def _too_long(self, takes: int) -> str:
        """Say that vLLM refuses the model for more tokens than it takes."""
        needs = self.arguments["max_model_len"]
        if "max_model_len" in self.options.engine:
            return f"--engine: max_model_len is {needs}, the model takes {takes} tokens."
        if self.workload.longest < needs - 1:
            return f"The checking set needs {needs} tokens, the model takes {takes}."
        fit = [
            name for name, shape in workloads.PRESETS.items() if shape.draw(name).longest < takes
        ]
        return (
            f"{self.workload.name} needs {needs} tokens, the model takes {takes}: use another "
            f"--workload ({', '.join((*fit, 'a file'))})."
        )

    def _prepare(self, facts: Mapping[str, Any]) -> None:
        self.arena.requests = self.workload.as_commands(facts["vocabulary"])
        tolerance = self.options.tolerance
        if tolerance is None:
            tolerance = MEAN_TOLERANCE.get(facts["dtype"], max(MEAN_TOLERANCE.values()))
        self.arena.tolerance = tolerance

    def _start_like(self, facts: Mapping[str, Any], default: Configuration) -> None:
        """Start an engine for a study whose evidence is there, built with the default.

        The reference may be plain PyTorch, of which no graphs can be captured.

        Raises:
            ConfigError: the study was made on another device, or with other versions or
                implementations.
        """
        here = self.arena.start(default)
        _check_same(
            facts["facts"], {key: here["facts"][key] for key in ("device", "shape", "versions")}
        )
        implementations.check_same(facts["implementations"], here["implementations"])
        self._prepare(here)

    def _search_arguments(self, graphs: bool) -> dict[str, Any]:
        """Return the arguments of the engine that is re-bound: not compiled, with graphs."""
        if not graphs or self.arguments.get("enforce_eager"):
            return {**self.arguments, "enforce_eager": True}
        given = self.arguments.get("compilation_config") or {}
        compilation = {"cudagraph_mode": "FULL_DECODE_ONLY", **given, "mode": 0}
        return {**self.arguments, "compilation_config": compilation}

    # -- search and decision

    def _search(self, study: optuna.Study, evidence: Evidence) -> None:
        space = evidence.space()
        seconds = self.options.seconds
        deadline = math.inf if seconds is None else self._began + SEARCH_SHARE * seconds

        def evaluate(configuration: Mapping[str, str]) -> Any:
            began, starts = time.monotonic(), len(self.arena.costs.starts)
            self.tell(f"trial: {space.name(configuration)}")
            outcome = run_trial(self.arena, self.objective, space.default, configuration)
            outcome.facts["seconds"] = time.monotonic() - began
            outcome.facts["restarts"] = len(self.arena.costs.starts) - starts
            return outcome

        def told() -> None:
            found = best(study)
            self.progress(
                Progress(
                    done=len(tried(study)),
                    trials=min(self.options.trials, space.size),
                    best=found.value if found is not None else None,
                    name=space.name(found.params) if found is not None else "",
                    seconds_left=None if seconds is None else deadline - time.monotonic(),
                )
            )

        def fits(configuration: Mapping[str, str]) -> bool:
            if not needs_restart(space.default, configuration, evidence.live):
                return True
            return time.monotonic() + self._restarting_seconds() < deadline

        search = Search(study, space, evidence, self.options.trials, deadline, evaluate, told, fits)
        search.plant_seeds()
        search.run()

    def _restarting_seconds(self) -> float:
        """Return how long a trial takes that restarts engines.

        One is started for each turn, and for the default of the next trial.
        """
        return 2 * PAIRS[0] * max(self.arena.costs.starts, default=0.0)

    def _over(self, more: float = 0.0) -> bool:
        """Whether the time is used up, or would be after so many seconds more."""
        seconds = self.options.seconds
        return seconds is not None and time.monotonic() + more >= self._began + seconds

    def _decide(self, study: optuna.Study, space: Space) -> dict[str, Any]:
        """Confirm the best configurations, one after another, until one wins.

        Raises:
            OutOfTime: the time was used up before there was anything to decide by.
        """
        over = tried(study)
        cut = self.options.seconds is not None and len(over) < min(self.options.trials, space.size)
        if cut and not any(space.changes(t.params) for t in over):
            raise OutOfTime(self._not_tried(space, bool(over)))
        promising = [t for t in ranked(study) if (t.value or 0) > 1 and space.changes(t.params)]
        # What has won before stays one that may win, though later trials look better.
        won = [
            t for t in promising[CONFIRMED:] if (found := kept(study, t)) and not is_refuted(found)
        ]
        confirmations = []
        for trial in (*promising[:CONFIRMED], *won):
            confirmations.append(self._confirmation(study, space, trial))
            if not is_refuted(confirmations[-1]):
                return self._winner(study, space, trial.params, confirmations)
        reason = "no configuration beat it by more than the noise"
        if not promising:
            reason = "no configuration looked faster in its trial"
        return {"winner": None, "reason": reason, "confirmations": confirmations}

    def _not_tried(self, space: Space, default_tried: bool) -> str:
        """Say why nothing but the default was tried, and what it takes."""
        others = [c for c in space.configurations() if space.changes(c)]
        if not all(needs_restart(space.default, c, self.arena.live) for c in others):
            what = "any trial but the default's" if default_tried else "any trial"
            return f"the time was used up before {what}"
        return self._needs_more([space.name(c) for c in others])

    def _left_out(self, study: optuna.Study, space: Space) -> str:
        """Say which choices no trial had, as restarts of engines did not fit into the time."""
        over = tried(study)
        if self.options.seconds is None or len(over) >= min(self.options.trials, space.size):
            return ""
        alone = [{**space.default, op: i} for op, ids in space.choices.items() for i in ids[1:]]
        names = [
            space.name(c)
            for c in alone
            if needs_restart(space.default, c, self.arena.live)
            and not any(space.changes(c).items() <= t.params.items() for t in over)
        ]
        return self._needs_more(names) if names else ""

    def _needs_more(self, names: list[str]) -> str:
        """Say how much time it takes to try what needs restarts of engines."""
        seconds = self._restarting_seconds()
        budget = (time.monotonic() - self._began + seconds) / SEARCH_SHARE
        left = f"{names[0]} is left to try: it"
        if len(names) > 1:
            left = f"{'; '.join(names)} are left to try: each"
        return (
            f"{left} needs about {math.ceil(seconds)} s of engine starts; raise --time-budget to "
            f"{10 * math.ceil(budget / 10)}s or more"
        )

    def _confirmation(
        self, study: optuna.Study, space: Space, trial: FrozenTrial
    ) -> dict[str, Any]:
        """Confirm and verify a trial's configuration, as far as that has not been decided before.

        Raises:
            OutOfTime: there was no time to decide.
        """
        found = kept(study, trial)
        if found is None:
            found = self._compare(space, trial.params)
            keep(study, trial, found)
        if "verification" not in found and not is_refuted(found):
            engines = self._engines_to_verify(study)
            if engines and self._over(engines * max(self.arena.costs.starts, default=0.0)):
                raise OutOfTime(
                    f"there was no time for the {engines} engine starts that verify "
                    f"{space.name(trial.params)}, which is confirmed"
                )
            found["verification"] = self._verify(study, trial.params, space.default)
            if self.options.verify_starts:  # otherwise nothing was measured
                keep(study, trial, found)
        return found

    def _compare(self, space: Space, configuration: Mapping[str, str]) -> dict[str, Any]:
        """Measure a configuration and the default on fresh runs.

        Raises:
            OutOfTime: the time was used up before anything was decided.
        """
        name = space.name(configuration)
        if self._over():
            raise OutOfTime(f"the time was used up before the confirmation of {name}")
        looks, how = LOOKS, ""
        if needs_restart(space.default, configuration, self.arena.live):
            looks = LOOKS[:1]
            how = f" with up to {engine_starts(looks[-1])} engine starts"
        self.tell(f"confirming{how}: {name}")
        try:
            outcome = confirm(
                self.arena,
                self.objective,
                space.default,
                configuration,
                CONFIRMED,
                self._over,
                looks,
            )
        except TrialFailed as failure:
            return {"name": name, "failure": str(failure)}
        return {"name": name, **outcome.to_dict()}

    def _winner(
        self,
        study: optuna.Study,
        space: Space,
        configuration: Mapping[str, str],
        confirmations: list[dict[str, Any]],
    ) -> dict[str, Any]:
        facts = study.user_attrs["facts"]
        evidence = Evidence.from_dict(study.user_attrs["evidence"])
        last = confirmations[-1]
        block = {
            **facts["facts"],
            "workload": self.workload.summary,
            "objective": str(self.objective),
            "gain": last["gain"],
            "noise": last["noise"],
            "measured_in": last["verification"]["text"],
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        failed = failed_alone(study, space)
        usable = {
            op: [impl for impl in impls if (op, impl) not in failed]
            for op, impls in evidence.usable.items()
        }
        changed = orders(space, usable, configuration)
        return {
            "winner": dict(configuration),
            "name": space.name(configuration),
            "file": results.file_content(self.settings, changed, block),
            "confirmations": confirmations,
        }

    def _rivals(self, study: optuna.Study) -> tuple[bool, bool]:
        """Whether a winner is verified against the default, and against the platform's own."""
        as_trials = not study.user_attrs["facts"]["graphs"] or self._runs_like_trials()
        return not as_trials, not is_platform_s_own(self.settings)

    def _engines_to_verify(self, study: optuna.Study) -> int:
        rivals = sum(self._rivals(study))
        return self.options.verify_starts * (1 + rivals) if rivals else 0

    def _verify(
        self, study: optuna.Study, configuration: Mapping[str, str], default: Mapping[str, str]
    ) -> dict[str, Any]:
        def engine(of_platform: bool) -> EngineArena:
            made = EngineArena(
                self.arguments,
                self.arena.policy_of,
                self._folder,
                self.arena.limits,
                rebind=False,
                unset=SETTING_VARIABLES if of_platform else (),
                tell=self.tell,
            )
            made.requests = self.arena.requests
            return made

        against_default, against_platform = self._rivals(study)
        if self._engines_to_verify(study):
            self.arena.stop()  # the memory is needed
        return verify(
            Verification(
                engine,
                self.objective,
                self.options.verify_starts,
                lambda costs: self._note_costs(study, costs),
            ),
            configuration,
            default if against_default else None,
            against_platform,
        )

    def _runs_like_trials(self) -> bool:
        given = self.arguments.get("compilation_config") or {}
        return bool(self.arguments.get("enforce_eager")) or given.get("mode") == 0

    def _note_costs(self, study: optuna.Study, costs: Costs) -> None:
        before = study.user_attrs.get("costs", {})
        merged = {
            key: [*before.get(key, ()), *values]
            for key, values in dataclasses.asdict(costs).items()
        }
        study.set_user_attr("costs", merged)


def _holds_nothing(study: optuna.Study) -> bool:
    return "evidence" not in study.user_attrs and not study.get_trials(deepcopy=False)


def _check_same(made: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for key, value in here.items():
        if value != made[key]:
            raise ConfigError(
                f"The study was made with {key} {made[key]}, here it is {value}. Give another "
                "--storage."
            )
