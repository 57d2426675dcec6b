"""Which vLLM layers dispatch takes over, and keeping them switched on under torch.compile.

With Inductor vLLM switches its custom ops off, so that a layer's plain PyTorch is compiled instead
of its ``forward_*`` method. A dispatched layer would then be passed over without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.dispatch.state import current_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CUSTOM_OPS = {
    "silu_and_mul": "silu_and_mul",
    "gelu_and_mul": "gelu_and_mul",
    "rms_norm": "rms_norm",
    "gemma_rms_norm": "gemma_rms_norm",
    "rotary_embedding": "rotary_embedding",
}
"""Operator -> what vLLM's ``custom_ops`` calls the layers that it runs in."""


def replaced() -> list[str]:
    """Return the operators whose vLLM layers the configuration replaces by dispatched ones."""
    config = current_config()
    return [op_name for op_name in CUSTOM_OPS if config.oot_decision(op_name)]


def enable(vllm_config: VllmConfig) -> None:
    """Switch on the layers that are replaced, unless the user has switched them off.

    Call it when vLLM has set the base mode ("all" or "none") and the defaults of its fusion
    passes: those look at the switches, and shall stay what they are without vllm-fl.
    """
    switches = vllm_config.compilation_config.custom_ops
    if "none" not in switches:
        return
    for op_name in replaced():
        name = CUSTOM_OPS[op_name]
        if f"+{name}" not in switches and f"-{name}" not in switches:
            switches.append(f"+{name}")
