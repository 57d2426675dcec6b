"""What the two entry points do."""

from __future__ import annotations

import sys

from vllm_fl.dispatch import discovery, env, state
from vllm_fl.dispatch.errors import BackendLoadError, VllmFLError
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.types import load_object
from vllm_fl.integration import custom_ops, unusable
from vllm_fl.integration.versions import check_vllm

NO_BACKEND = (
    "vllm-fl-core is installed, but no backend wheel: install the one for your device (pip install "
    "vllm-fl-reference for the CPU), or set VLLM_PLUGINS='' to run vLLM without vllm-fl."
)


def platform_class() -> str | None:
    """Choose the device and return its platform class for vLLM, or None to stay out of the way.

    vLLM drops whatever a platform plugin raises and goes on without it, so a fault that the user
    must see is returned as a class that raises it when vLLM makes its platform.
    """
    decision = check_vllm()
    if not decision:
        return unusable.refuse(decision.reason)
    try:
        backends = discovery.get_discovered_plugins()
        choice = state.current_device()
        state.get_global_policy()
    except VllmFLError as error:
        return unusable.refuse(str(error))
    except Exception as error:
        return unusable.refuse(f"vllm-fl cannot start: {type(error).__name__}: {error}")
    logger = get_logger("vllm_fl.integration")
    if not backends:
        return unusable.refuse(NO_BACKEND)
    if choice.device is not None and not choice.present:
        try:
            load_object(choice.device.platform)
        except BackendLoadError as error:
            return unusable.refuse(f"{state.absent_device()} {error}.")
        logger.warning("%s vLLM goes on, since it was named.", state.absent_device())
    if choice.device is None:
        broken = "; ".join(f"{b.name}: {b.decision.reason}" for b in backends if not b.decision)
        reasons = "; ".join(filter(None, (choice.reasons(), broken)))
        logger.warning(
            "No installed backend has a device on this machine, vLLM goes on without vllm-fl. %s",
            reasons or "None of them brings a device (vllm-fl-reference brings the CPU).",
        )
        return None
    if choice.rivals:
        logger.warning(
            "Several backends claim this machine: %s is used, not %s; %s names another.",
            choice.backend, ", ".join(choice.rivals), env.PLATFORM.name,
        )  # fmt: skip
    return choice.device.platform.replace(":", ".")


def install_layers() -> None:
    """Install the dispatched layers if the platform in use is one of vllm-fl's.

    Called again under another configuration, it installs what that one says.
    """
    if not check_vllm():
        return  # the platform, made first, has said so
    _make_variables_known()
    from vllm.platforms import current_platform

    from vllm_fl.integration.platform import PlatformFL

    if not isinstance(current_platform, PlatformFL):
        return
    operators = custom_ops.replaced()
    # The import takes seconds, and not every process of vLLM needs vLLM's layers.
    if operators or "vllm_fl.integration.layers" in sys.modules:
        from vllm_fl.integration import layers

        layers.install(operators)


def _make_variables_known() -> None:
    """Tell vLLM of our variables: it warns of each ``VLLM_*`` that its table does not have."""
    from vllm import envs

    for variable in env.VARIABLES:
        # vLLM hashes the values into its compile-cache key, where those that matter are already.
        envs.environment_variables.setdefault(variable.name, lambda: None)
