"""Starting vLLM for a command: whether it can be, and why it refuses, each in a sentence."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from vllm_fl.dispatch import env, state
from vllm_fl.dispatch.errors import ConfigError, VllmFLError


def check_platform(what: str) -> None:
    """Import vLLM, which chooses its platform.

    Args:
        what: needs vLLM, for the error.

    Raises:
        ConfigError: vLLM cannot be imported, or finds no device to run on.
    """
    leave_out = f"Leave {what} out, or run" if what.startswith("-") else "Run"
    try:
        from vllm.platforms import current_platform
    except VllmFLError:
        raise
    except ImportError as error:
        forced = env.PLATFORM.read()
        advice = "" if forced is None else f" {env.PLATFORM.name}={forced!r} chose the device."
        raise ConfigError(
            f"{what} needs vLLM, which cannot be imported here: {error}.{advice} {leave_out} it "
            "where vLLM starts on that device."
        ) from error
    if current_platform.is_unspecified():
        choice = state.current_device()
        if choice.device is not None:
            has = choice.device.name
            reason = f"it runs without vllm-fl, which has {has!r}. Unset VLLM_PLUGINS"
        else:
            reason = f"{choice.reasons() or 'no backend brings one'}. {leave_out} it elsewhere"
            reason += ", or pip install vllm-fl-reference for the CPU"
        raise ConfigError(f"{what} needs a device, and vLLM finds none here: {reason}.")


@dataclass(frozen=True)
class Refusal:
    """Why vLLM refuses its arguments.

    Attributes:
        reason: one line.
        argument: the one that it refuses, where that is known.
        ours: the error of vllm-fl that was raised in vLLM's validation, if it was one.
    """

    reason: str
    argument: str = ""
    ours: VllmFLError | None = None


def refusal(error: Exception) -> Refusal:
    """Read vLLM's error."""
    from pydantic import ValidationError  # vLLM's; wraps whatever is raised in a validation

    argument, text, ours = "", str(error), None
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        wrapped = first.get("ctx", {}).get("error")
        ours = wrapped if isinstance(wrapped, VllmFLError) else None
        argument = str(first["loc"][0]) if first["loc"] else ""
        text = first["msg"].removeprefix("Value error, ")
    reason = textwrap.shorten(text.strip().partition("\n")[0], 300).rstrip(".")
    return Refusal(reason, argument, ours)
