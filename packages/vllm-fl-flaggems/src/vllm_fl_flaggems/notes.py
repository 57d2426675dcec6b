"""What `vllm-fl explain` and `vllm-fl doctor` say about flag_gems. Imports neither it nor torch."""

from __future__ import annotations

from vllm_fl_flaggems.gems.source import installed

MEASURED = {
    "rms_norm": "takes 0.99 to 2.00 times as long",
    "silu_and_mul": "takes 1.50 to 2.78 times as long",
    "rotary_embedding": "takes 9.54 to 9.76 times as long for up to 64 tokens and is less exact "
    "for more",
}
"""Operator -> how flag_gems' kernel compares with the wheel's own.

From benchmarks/results/kernels-h200.json: flag_gems 5.0.2 on one H200, bf16, in CUDA graphs.
"""


def note(op_name: str) -> str:
    """Say what runs an operator inside this wheel, and why not flag_gems."""
    found = installed()
    here = f"flag_gems {found.version} is installed" if found else "flag_gems is not installed"
    compared = MEASURED.get(op_name)
    reason = f"; its kernel for this operator {compared} (5.0.2 on an H200)" if compared else ""
    return f"own Triton kernel; {here}{reason if found else ''}"
