"""A process that searches on a modelled engine: python searcher.py URL TRIALS SECONDS_A_TRIAL."""

from __future__ import annotations

import sys
import time

from modelled import PLANTED, TOGETHER, ModelledArena, search

from vllm_fl.autotune.search import Outcome, make_sampler
from vllm_fl.autotune.studies import open_storage, open_study

NAME = "autotune planted"


def main() -> None:
    url, trials, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    arena = ModelledArena(PLANTED, TOGETHER)

    def evaluate(configuration):
        time.sleep(seconds)
        return Outcome(1 / arena.seconds(configuration), {"by": sys.argv[4]})

    with open_storage(url) as storage:
        study = open_study(NAME, storage, make_sampler(0), resume=True)
        search(arena, trials, study, evaluate=evaluate)


if __name__ == "__main__":
    main()
