"""A model of an engine for the search layer: planted choices and noise."""

from __future__ import annotations

import math
import random

import optuna

from vllm_fl.autotune.evidence import Evidence, OperatorEvidence
from vllm_fl.autotune.measuring import run_trial
from vllm_fl.autotune.objective import Objective
from vllm_fl.autotune.search import Outcome, Search, make_sampler
from vllm_fl.autotune.supervisor import TrialFailed

optuna.logging.set_verbosity(optuna.logging.ERROR)
THROUGHPUT = Objective.parse("throughput")


class ModelledArena:
    """An engine whose step takes the sum of its operators' times, and what pairs add to it.

    Args:
        times: operator -> implementation -> seconds, alone.
        together: (operator, implementation) pairs that slow each other -> seconds.
        noise: standard deviation of the logarithm of a run's time.
        wrong: implementations that generate something else.
    """

    def __init__(self, times, together=(), noise=0.0, wrong=(), seed=0):
        self.times, self.together, self.noise, self.wrong = times, dict(together), noise, wrong
        self.random = random.Random(seed)
        self.measured = 0
        self.live = {}

    def seconds(self, configuration):
        total = 1.0 + sum(self.times[op][impl] for op, impl in configuration.items())
        chosen = set(configuration.items())
        return total + sum(cost for pair, cost in self.together.items() if chosen >= set(pair))

    def admit(self, configuration):
        for impl in configuration.values():
            if impl in self.wrong:
                raise TrialFailed(f"{impl} is wrong")

    def measure(self, configuration):
        self.measured += 1
        seconds = self.seconds(configuration) * math.exp(self.random.gauss(0, self.noise))
        return {
            "output_tokens_per_second": 100 / seconds,
            "latency_seconds": seconds,
            "first_token_seconds": seconds,
        }

    def evidence(self):
        operators = {
            op: OperatorEvidence(
                available=tuple(impls), share=impls[next(iter(impls))] / 2, calls={"c": [1, 1.0]},
                timings={"c": {impl: [s + 0.01] * 7 for impl, s in impls.items()}},
            )
            for op, impls in self.times.items()
        }  # fmt: skip
        return Evidence(operators)


def search(arena, trials, study=None, deadline=math.inf, evaluate=None, **more):
    study = study or optuna.create_study(direction="maximize", sampler=make_sampler(0))
    evidence = arena.evidence()
    space = evidence.space()

    def measured(configuration) -> Outcome:
        return run_trial(arena, THROUGHPUT, space.default, configuration)

    found = Search(study, space, evidence, trials, deadline, evaluate or measured, **more)
    found.plant_seeds()
    found.run()
    return found


PLANTED = {
    "silu_and_mul": {"flagos": 0.5, "vendor": 0.1, "reference": 0.3},
    "rms_norm": {"flagos": 0.2, "vendor": 0.1, "reference": 0.15},
    "rotary_embedding": {"flagos": 0.1, "vendor": 0.2},
    "moe_sum": {"flagos": 0.1, "vendor": 0.09},
}
TOGETHER = {(("silu_and_mul", "vendor"), ("rms_norm", "vendor")): 0.4}
