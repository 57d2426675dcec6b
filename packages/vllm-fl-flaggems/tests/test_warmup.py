"""The warm-up compiles every variant that serving needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from vllm_fl_flaggems.backend import FlagGemsBackend


def test_the_counts() -> None:
    assert FlagGemsBackend().warmup_tokens(8192) == (1, 8192)
    assert FlagGemsBackend().warmup_tokens(1) == (1,)


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
    variants = {name: row["warm"] for name, row in report.items()}
    assert variants == {
        "silu": 2, "silu, narrow": 1, "gelu": 2, "norm": 1, "add norm": 1, "head norm": 2,
        "rotary": 2, "rotary, few heads": 2,
    }  # fmt: skip
