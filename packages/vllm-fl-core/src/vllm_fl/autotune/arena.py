"""Engines as a place to measure: one engine serves many configurations, re-bound while it lives.

It is started anew when it has ended or hung, when a configuration differs in an operator that is
asked only when the model is built (unless the engine can change it), and when the engine says that
it cannot be re-bound.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from vllm_fl.autotune.agreement import Continuation, agree
from vllm_fl.autotune.space import Configuration, needs_restart
from vllm_fl.autotune.supervisor import EngineProcess, TrialFailed
from vllm_fl.dispatch.env import EnvVar

_Key: TypeAlias = tuple[tuple[str, str], ...]

CHECK_LENGTHS = (5, 17, 48, 96)
CHECK_NEW_TOKENS = 12


@dataclass
class Limits:
    """Seconds after which an engine is taken for hung.

    Attributes:
        start: while it starts.
        run: while it serves, is checked or re-bound.
    """

    start: float = 1800.0
    run: float = 600.0


@dataclass
class Costs:
    """What was spent: seconds of each start of an engine, re-binding and run of the workload."""

    starts: list[float] = field(default_factory=list)
    rebinds: list[float] = field(default_factory=list)
    runs: list[float] = field(default_factory=list)


def check_prompts(vocabulary: int, longest: int) -> list[list[int]]:
    """Return the checking set: the same in every process."""
    generator = random.Random(1)
    lengths = [min(n, longest - CHECK_NEW_TOKENS) for n in CHECK_LENGTHS]
    return [[generator.randrange(vocabulary) for _ in range(n)] for n in lengths]


class EngineArena:
    """Measures configurations on engines of its own.

    Args:
        arguments: of vLLM's ``LLM``.
        policy_of: the content of the policy of a configuration.
        folder: for logs.
        limits: time limits.
        rebind: whether an engine may be re-bound; False starts one for each configuration.
        unset: environment variables that its engines shall not see.
        tell: called with what happens, for people.

    Attributes:
        facts: what the engine consists of, as it said when it last started.
        reference: what the reference generates for the checking set; None until it is set.
        tolerance: see ``agreement``.
        live: operator that is asked when the model is built -> choices among which an engine that
            may be re-bound can change.
        requests: the workload, as the engine takes it.
        costs: what was spent.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        policy_of: Callable[[Configuration], dict[str, Any]] | None,
        folder: Path,
        limits: Limits,
        rebind: bool = True,
        unset: Sequence[EnvVar] = (),
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.arguments = arguments
        self.policy_of = policy_of
        self.limits = limits
        self.rebind = rebind
        self.facts: dict[str, Any] = {}
        self.reference: list[Continuation] | None = None
        self.tolerance = 0.0
        self.live: Mapping[str, Sequence[str]] = {}
        self.requests: list[dict[str, Any]] = []
        self.costs = Costs()
        self._folder = folder
        self._unset = unset
        self._tell = tell
        self._engine: EngineProcess | None = None
        self._built: Configuration = {}
        self._bound: Configuration | None = None
        self._admitted: set[_Key] = set()
        self._warm: set[_Key] = set()  # what the engine that runs has served

    # -- the engine

    def start(self, configuration: Configuration | None = None) -> dict[str, Any]:
        """Start an engine in place of the one that runs.

        Args:
            configuration: what it is built with; None for the policy that the settings give.

        Raises:
            TrialFailed: it did not start.
        """
        self.stop()
        self._tell(f"starting engine {len(self.costs.starts) + 1}")
        began = time.monotonic()
        policy = None
        if configuration is not None:
            assert self.policy_of is not None
            policy = self.policy_of(configuration)
        log = self._folder / f"engine-{time.time_ns()}.log"
        self._engine = EngineProcess(log, self._unset)
        self.facts = self.ask(
            "start",
            self.limits.start,
            arguments=self.arguments,
            policy=policy,
            live_attention=self.rebind,
        )
        self.costs.starts.append(time.monotonic() - began)
        self._built = self._bound = configuration or {}
        return self.facts

    def built_with(self, configuration: Configuration) -> None:
        """Take note of what the settings' own policy, under which the engine started, chooses."""
        self._built = configuration

    def ask(self, do: str, limit: float | None = None, **arguments: Any) -> Any:
        """Send the engine a command; if it fails, the engine is ended.

        Raises:
            TrialFailed: it failed.
        """
        assert self._engine is not None
        try:
            return self._engine.ask(limit or self.limits.run, do, **arguments)
        except BaseException:
            self._engine.kill()
            raise

    def worker(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine's workers; see ``integration.tuning``."""
        return self.ask("worker", method=method, arguments=list(arguments))

    @property
    def alive(self) -> bool:
        """Whether an engine runs."""
        return self._engine is not None and self._engine.alive

    def stop(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.stop()
        self._engine, self._bound = None, None
        self._warm.clear()

    # -- configurations

    def bind(self, configuration: Configuration) -> None:
        """Put a configuration in force.

        Raises:
            TrialFailed: it cannot be.
        """
        if self.alive and self._bound == configuration:
            return
        live = self.alive and self.rebind
        if not live or needs_restart(self._built, configuration, self.live):
            self.start(configuration)
        try:
            self._rebind(configuration)
        except TrialFailed as failure:
            if "NotRebindable" not in str(failure) and "orkspace" not in str(failure):
                raise
            # vLLM's workspace does not grow while graphs refer to it: a new engine makes room.
            self._tell(f"a restart is needed: {failure}")
            self.start(configuration)
            self._rebind(configuration)

    def _rebind(self, configuration: Configuration) -> None:
        if self.rebind and self._bound != configuration:
            assert self.policy_of is not None
            self._bound = None
            began = time.monotonic()
            answer = self.worker("fl_set_policy", self.policy_of(configuration))
            self.costs.rebinds.append(time.monotonic() - began)
            wrong = {
                op: answer["bound"].get(op)
                for op, impl in configuration.items()
                if answer["bound"].get(op) != impl
            }
            if wrong:
                raise TrialFailed(f"other implementations were bound than asked for: {wrong}")
        self._bound = configuration

    def generate(self, configuration: Configuration) -> list[Continuation]:
        """Return what a configuration generates for the checking set."""
        self.bind(configuration)
        prompts = check_prompts(self.facts["vocabulary"], self.arguments["max_model_len"])
        answer = self.ask("check", prompts=prompts, new_tokens=CHECK_NEW_TOKENS)
        return [Continuation.from_dict(content) for content in answer]

    def set_reference(self, configuration: Configuration) -> None:
        """Take what a configuration generates for the checking set as right.

        Raises:
            TrialFailed: it cannot run.
        """
        self.reference = self.generate(configuration)

    def admit(self, configuration: Configuration) -> None:
        """Put a configuration in force and, once each, check what it generates.

        Raises:
            TrialFailed: it cannot run, or does not agree with the reference.
        """
        key = _key(configuration)
        if key not in self._admitted and self.reference is not None:
            decision = agree(self.generate(configuration), self.reference, self.tolerance)
            if not decision:
                raise TrialFailed(f"it does not agree with the reference: {decision.reason}")
            self._admitted.add(key)
        self.bind(configuration)

    def measure(self, configuration: Configuration) -> Mapping[str, float]:
        """Serve the workload once; return the metrics.

        An engine's first run of a configuration compiles kernels, so it is not the one measured.
        """
        self.bind(configuration)
        if _key(configuration) not in self._warm:
            self.ask("serve", requests=self.requests)
            self._warm.add(_key(configuration))
        metrics: dict[str, float] = self.ask("serve", requests=self.requests)
        self.costs.runs.append(metrics["seconds"])
        return metrics


def _key(configuration: Configuration) -> _Key:
    return tuple(sorted(configuration.items()))
