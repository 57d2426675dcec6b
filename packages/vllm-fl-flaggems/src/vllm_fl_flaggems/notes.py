"""What `vllm-fl explain` and `vllm-fl doctor` say about flag_gems. Imports neither it nor torch."""

from __future__ import annotations

from vllm_fl.dispatch import state
from vllm_fl_flaggems.gems.aten import is_asked_for, select
from vllm_fl_flaggems.gems.mends import MENDS
from vllm_fl_flaggems.gems.source import installed
from vllm_fl_flaggems.gems.start import possible


def note(op_name: str) -> str:
    """Say what runs an operator inside this wheel, and who compares it with flag_gems'."""
    found = installed()
    if not found:
        return "own Triton kernel; flag_gems is not installed"
    return (
        f"own Triton kernel; flag_gems {found.version} is installed, "
        "and vllm-fl's benchmarks time its kernels, too"
    )


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
