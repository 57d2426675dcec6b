"""Handing the policy from the process that configures vLLM to the processes that run the model.

The parent writes into vLLM's own configuration (``additional_config["vllm_fl"]``, which vLLM sends
to every process and puts into its compile-cache key) the policy in force, what its environment
says, which model it is, and what implements each operator. Where the model is built, the latter is
corrected: what cannot be loaded, or cannot take the model, is passed over, and vLLM makes the key
when the model first runs. A child whose environment says something else has lost a variable: that
is an error, not a different run. A policy set from Python in the parent, process-wide or by a
context around ``LLM(...)``, is taken over by children alone: where the engine runs in the parent,
its layers are built inside that context.

The tuner, and nobody else, gives ``additional_config={"vllm_fl": {"live_attention": True}}`` to its
engine: attention can then be chosen anew while it lives, see ``live_attention``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import env, state
from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl.dispatch.predicate import predicate
from vllm_fl.dispatch.types import OpImpl

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "vllm_fl"
LIVE_ATTENTION = "live_attention"
_adopted: str | None = None
_published: set[tuple[int, str]] = set()  # with the process, for a forked child has it, too


def publish(vllm_config: VllmConfig) -> None:
    """Write this process's policy and operator table into vLLM's configuration."""
    additional: Any = vllm_config.additional_config
    if not isinstance(additional, dict):
        raise ConfigError(
            f"additional_config is {type(additional).__name__}; vllm-fl needs a dictionary there, "
            "to hand its policy to vLLM's worker processes."
        )
    given = additional.get(KEY, {})
    if not isinstance(given, dict) or (given.keys() - {LIVE_ATTENTION} and "policy" not in given):
        raise ConfigError(f"additional_config[{KEY!r}] is reserved for vllm-fl; use another key.")
    if "policy" not in given:
        model = vllm_config.model_config
        additional[KEY] = {
            **given,
            "architectures": [] if model is None else list(model.architectures),
            "environment": _environment(),
            "policy": state.get_policy().to_dict(),
            "operators": operator_versions(),
        }
        _published.add((os.getpid(), _what_to_adopt(additional[KEY])))


def _what_to_adopt(published: Mapping[str, Any]) -> str:
    return str((published["environment"], published["policy"]))


def wants_live_attention(vllm_config: VllmConfig) -> bool:
    """Whether attention shall be such that it can be chosen anew while the engine lives."""
    additional: Any = vllm_config.additional_config
    return bool(additional.get(KEY, {}).get(LIVE_ATTENTION))


def architectures(vllm_config: VllmConfig) -> list[str]:
    """Return those of the whole model, also where vLLM builds a part by a configuration of its own.

    Empty where nothing was published.
    """
    published = vllm_config.additional_config.get(KEY, {})
    return list(published.get("architectures", ()))


def _environment() -> dict[str, str]:
    """Return what the environment says about which implementations run, as text."""
    settings = {key: repr(value.value) for key, value in state.current_config().values.items()}
    return settings | {v.name: repr(v.read()) for v in _CHOOSING}


_CHOOSING = (env.PLUGIN_MODULES, env.PLATFORM, env.COMPARE, env.COMPARE_LIMIT)


def operator_versions() -> dict[str, str]:
    """Return operator -> the implementation that runs it and its wheel with version."""
    chosen = get_default_manager().first_choices()
    return {name: _described((impl,)) for name, impl in chosen.items()}


def _described(impls: Iterable[OpImpl]) -> str:
    return " > ".join(f"{impl.impl_id} {impl.wheel}".strip() for impl in impls)


def note_bound(vllm_config: VllmConfig, op_name: str) -> None:
    """Put into the compile-cache key what a layer calls: the first choice, and who else may answer.

    Those that cannot be loaded have been put aside when the operator was bound.
    """
    order = get_default_manager().rank(op_name).order
    able = list(takewhile(lambda impl: predicate(impl) is not None, order))
    note_choice(vllm_config, op_name, order[: len(able) + 1])


def note_choice(vllm_config: VllmConfig, name: str, impls: Iterable[OpImpl]) -> None:
    """Put into the compile-cache key what has been chosen for an operator, or for one phase of it.

    Args:
        vllm_config: vLLM's configuration of the model that is being built.
        name: the operator, with the phase where phases have orders of their own.
        impls: what may run, first choice first.
    """
    published = vllm_config.additional_config.get(KEY)
    if published is not None:
        published["operators"][name] = _described(impls)


def adopt(vllm_config: VllmConfig) -> None:
    """Take over the policy that the parent published, once a process and policy.

    The process that published it has it already.

    Raises:
        ConfigError: this process's environment differs from the parent's.
    """
    global _adopted
    published = vllm_config.additional_config.get(KEY)
    if published is None:
        return
    asked = _what_to_adopt(published)
    if asked == _adopted or (os.getpid(), asked) in _published:
        return
    here, there = _environment(), published["environment"]
    lost = [f"{key} is {here[key]}, was {there[key]}" for key in here if here[key] != there[key]]
    if lost:
        raise ConfigError(
            "The environment of this process says something else to vllm-fl than that of the "
            f"process that configured vLLM: {'; '.join(lost)}. Pass the variables on to vLLM's "
            "workers."
        )
    policy = SelectionPolicy.from_dict(**published["policy"])
    if policy != state.get_global_policy():
        state.set_global_policy(policy)
    _adopted = asked
