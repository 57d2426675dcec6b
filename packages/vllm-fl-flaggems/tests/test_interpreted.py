"""Triton's interpreter, as Triton ships it, computes bf16 wrongly: it is refused."""

from __future__ import annotations

import os
import subprocess
import sys

from vllm_fl_flaggems.kernels.interpreted import BFLOAT16_REFUSAL

ASKED = """
import torch
from vllm_fl_flaggems.attention.backend import AttentionFLBackend
from vllm_fl_flaggems.ops import activation

for dtype in (torch.bfloat16, torch.float16):
    x = torch.ones(4, 64, dtype=dtype)
    print(activation.supports_silu(x))
    print(AttentionFLBackend.supports_combination(64, dtype, "auto"))
"""


def test_the_repaired_interpreter_of_these_tests_computes_bfloat16():
    assert BFLOAT16_REFUSAL == ""


def test_the_interpreter_as_it_is_gets_no_bfloat16():
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASKED], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = done.stdout.splitlines()[-4:]  # vLLM logs before
    refusal = "Triton's interpreter computes bfloat16 wrongly; use float16 or float32 with it"
    assert told == [refusal, refusal, "True", "None"]
