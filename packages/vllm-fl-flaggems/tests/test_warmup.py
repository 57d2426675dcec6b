"""The warm-up compiles every variant that serving needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fl.dispatch.backend import ExpertsShape
from vllm_fl_flaggems.backend import FlagGemsBackend
from vllm_fl_flaggems.warmup import stretches, tile_choices, token_ranges

MEMORY = 227 * 1024
QWEN3 = ExpertsShape(
    k=8, routed=128, groups=1, experts=128, local=128, hidden=2048, inner=768, itemsize=2
)


def test_the_counts_of_a_dense_model() -> None:
    assert token_ranges(8192, [], MEMORY) == [range(1, 2), range(8192, 8193)]
    assert token_ranges(1, [], MEMORY) == [range(1, 2)]


def test_nothing_is_compiled_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert FlagGemsBackend().warmup_tokens(8192, [QWEN3]) == []


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_choice_never_comes_back(ranks: int) -> None:
    """What bisection rests on: the ranges are those of asking for every count."""
    shape = ExpertsShape(**{**vars(QWEN3), "ranks": ranks})
    for choice in tile_choices(shape, MEMORY):
        chosen = [choice(tokens) for tokens in range(1, 4097)]
        starts = [i + 1 for i in range(4096) if i == 0 or chosen[i] != chosen[i - 1]]
        found = list(stretches(choice, 4096))
        assert [counts.start for counts in found] == starts
        assert [counts.stop for counts in found] == [*starts[1:], 4097]


def test_stretches_ask_for_few_numbers() -> None:
    asked = []

    def choice(n: int) -> int:
        asked.append(n)
        return n // 3000

    found = [range(1, 3000), range(3000, 6000), range(6000, 8193)]
    assert list(stretches(choice, 8192)) == found
    assert len(asked) < 60


def test_no_number_of_tokens_compiles_late() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("specialisations.py"))],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {name: row["late"] for name, row in report.items()} == {name: [] for name in report}
    variants = {name: (row["warm"], row["runs"]) for name, row in report.items()}
    assert variants == {
        "silu": (2, 1), "silu, narrow": (1, 1), "gelu": (2, 1), "norm": (1, 1),
        "add norm": (1, 1), "head norm": (2, 1), "rotary": (2, 1), "rotary, few heads": (2, 1),
        "Qwen3-30B-A3B": (34, 11), "with graphs": (34, 3),
        "Mixtral-8x7B": (33, 13), "Mixtral-8x7B, half of its experts": (33, 12),
        "DeepSeek-V3 on 8 ranks of data": (36, 12), "small and odd": (32, 13),
        "attention 8/8 of 64, 40960 tokens, decode": (12, None),
        "attention 8/8 of 64, 40960 tokens, all": (14, None),
        "attention 32/8 of 128, 40960 tokens, decode": (12, None),
        "attention 32/8 of 128, 40960 tokens, all": (14, None),
        "attention 64/8 of 128, 8192 tokens, decode": (12, None),
        "attention 64/8 of 128, 8192 tokens, all": (14, None),
        "attention 16/8 of 256, 40960 tokens, decode": (12, None),
        "attention 16/8 of 256, 40960 tokens, all": (14, None),
        "attention 4/1 of 64, 100 tokens, decode": (3, None),
        "attention 4/1 of 64, 100 tokens, all": (5, None),
        "attention 128/1 of 128, 40960 tokens, decode": (10, None),
        "attention 128/1 of 128, 40960 tokens, all": (11, None),
    }  # fmt: skip
