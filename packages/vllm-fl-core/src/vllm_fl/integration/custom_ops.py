"""Which vLLM layers dispatch takes over, and keeping them switched on under torch.compile.

With Inductor vLLM switches its custom ops off, so that a layer's plain PyTorch is compiled instead
of its ``forward_*`` method. A dispatched layer would then be passed over without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.errors import ConfigError, nearest
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.policy import match_token
from vllm_fl.dispatch.state import current_config
from vllm_fl.dispatch.types import YES, Decision

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger("vllm_fl.integration")

CUSTOM_OPS = ("silu_and_mul", "gelu_and_mul", "rms_norm", "gemma_rms_norm", "rotary_embedding")
"""Operators whose layers vLLM switches off; its ``custom_ops`` has the same names for them."""

LAYERS = (*CUSTOM_OPS, "fused_experts", "topk_softmax", "grouped_topk")
"""Every operator that a dispatched layer calls."""


def is_asked_for(op_name: str) -> bool:
    """Whether the user asks for the layer of this operator by a list or an order.

    A preference asks for no operator in particular, and the platform's defaults are not the user.
    """
    config = current_config()
    if config["oot_whitelist"] is not None and not config.is_default("oot_whitelist"):
        return op_name in config["oot_whitelist"]
    if config.names(op_name):
        return True
    if not config.is_default("prefer"):  # which has emptied the defaults' list
        return False
    default = config.defaults.get("oot_blacklist")
    on_the_list = default is not None and op_name in default.value
    return on_the_list and op_name not in config["oot_blacklist"]


def decision(op_name: str) -> Decision:
    """Whether the vLLM layer of an operator is replaced by a dispatched one, and why not.

    Where only the platform's defaults want that, the first in their order must be there: a layer
    is taken from vLLM for its sake.
    """
    config = current_config()
    decided = config.oot_decision(op_name)
    order = config["op_backends"].get(op_name)
    if not decided or order is None or is_asked_for(op_name):
        return decided
    ranking = get_default_manager().rank(op_name)
    if any(match_token(impl, order[0]) for impl in ranking.order):
        return YES
    refused = [
        f"{impl.impl_id}: {no.reason}"
        for impl, no in ranking.rejected
        if match_token(impl, order[0])
    ]
    first = f"{order[0]}, first in {config.order_sources[op_name]}"
    return Decision.no(f"{first}, does not run ({'; '.join(refused) or 'it is not installed'})")


def check_lists() -> None:
    """Check the names in the lists of layers.

    Raises:
        ConfigError: a list of the configuration names an operator that has no layer.
    """
    config = current_config()
    for key in ("oot_whitelist", "oot_blacklist"):
        for name in config[key] or ():
            if name not in LAYERS:
                raise ConfigError(
                    f"{config.values[key].source}: {key} names {name!r}, which is not an operator "
                    f"with a vLLM layer. {nearest(name, LAYERS)}"
                )


def replaced() -> list[str]:
    """Return the operators whose vLLM layers the configuration replaces by dispatched ones.

    Raises:
        ConfigError: a list of the configuration names an operator that has no layer.
    """
    check_lists()
    decisions = {op_name: decision(op_name) for op_name in LAYERS}
    for op_name, decided in decisions.items():
        if not decided:
            logger.info("vLLM keeps its own layers for %s: %s.", op_name, decided.reason)
    return [op_name for op_name, decided in decisions.items() if decided]


def enable(vllm_config: VllmConfig) -> None:
    """Switch on the layers that are replaced, unless the user has switched them off.

    Call it when vLLM has set the base mode ("all" or "none") and the defaults of its fusion
    passes: those look at the switches, and shall stay what they are without vllm-fl.
    """
    switches = vllm_config.compilation_config.custom_ops
    if "none" not in switches:
        return
    for op_name in CUSTOM_OPS:
        asked = f"+{op_name}" in switches or f"-{op_name}" in switches
        if not asked and decision(op_name):
            switches.append(f"+{op_name}")
