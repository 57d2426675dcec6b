"""Handing the policy from the process that configures vLLM to the processes that run the model.

The parent writes into vLLM's own configuration (``additional_config["vllm_fl"]``, which vLLM sends
to every process and puts into its compile-cache key) the policy in force, a fingerprint of what
its environment says, what implements each operator, and which operators' vLLM layers dispatch. A
child whose environment says something else has lost a variable: that is an error, not a different
run. A policy set from Python in the parent is taken over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import env, state
from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.ops import CATALOGUE
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl.integration import custom_ops

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "vllm_fl"
_adopted: str | None = None


def publish(vllm_config: VllmConfig) -> None:
    """Write this process's policy and operator table into vLLM's configuration."""
    additional: Any = vllm_config.additional_config
    if not isinstance(additional, dict):
        raise ConfigError(
            f"additional_config is {type(additional).__name__}; vllm-fl needs a dictionary there, "
            "to hand its policy to vLLM's worker processes."
        )
    if KEY not in additional:
        additional[KEY] = {
            "environment": state.current_config().policy().fingerprint(),
            "variables": env.texts(),
            "policy": state.get_global_policy().to_dict(),
            "operators": operator_versions(),
            "layers": custom_ops.replaced(),
        }


def operator_versions() -> dict[str, str]:
    """Return operator -> the implementation that runs it and its wheel with version."""
    manager = get_default_manager()
    chosen = {op: manager.rank(op, state.get_global_policy()).order for op in CATALOGUE}
    return {op: f"{o[0].impl_id} {o[0].wheel}".strip() for op, o in chosen.items() if o}


def adopt(vllm_config: VllmConfig) -> None:
    """Take over the policy that the parent published, once a process and policy.

    Raises:
        ConfigError: this process's environment differs from the parent's.
    """
    global _adopted
    published = vllm_config.additional_config.get(KEY)
    if published is None or str(published) == _adopted:
        return
    if state.current_config().policy().fingerprint() != published["environment"]:
        raise ConfigError(
            "The environment of this process gives another vllm-fl policy than the process that "
            f"configured vLLM had. There: {published['variables'] or 'nothing set'}; here: "
            f"{env.texts() or 'nothing set'}. Pass the variables on to vLLM's workers."
        )
    policy = SelectionPolicy.from_dict(**published["policy"])
    if policy != state.get_global_policy():
        state.set_global_policy(policy)
    _adopted = str(published)
