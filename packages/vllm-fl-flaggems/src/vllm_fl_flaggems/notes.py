"""What `vllm-fl explain` and `vllm-fl doctor` say about flag_gems. Imports neither it nor torch."""

from __future__ import annotations

from vllm_fl.dispatch import state
from vllm_fl_flaggems.gems.aten import is_asked_for, select
from vllm_fl_flaggems.gems.mends import MENDS
from vllm_fl_flaggems.gems.source import installed
from vllm_fl_flaggems.gems.start import possible

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


def facts() -> dict[str, object]:
    """Return flag_gems' version, what is mended before its kernels run, and what it shall run."""
    found = installed()
    report: dict[str, object] = {"flag_gems": found.version if found else None}
    if found:
        report["mended in each worker before flag_gems runs"] = {
            mend.name: mend.why if mend.needed(found) else "not needed" for mend in MENDS
        }
    policy = state.get_global_policy()
    asked = is_asked_for(state.current_config(), policy)
    decision = asked and possible()
    if found and decision:
        report["ATen operators"] = f"{len(select(found, policy).keys)} through flag_gems"
    else:
        report["ATen operators"] = f"PyTorch's own: {decision.reason}"
    return report
