"""A platform that cannot be: says why vllm-fl cannot run, where vLLM does not swallow it."""

from __future__ import annotations

from vllm_fl.dispatch.errors import VllmFLError

_reason = ""


class UnusablePlatform:
    """Raises, when vLLM makes it, the reason that :func:`refuse` was given."""

    def __init__(self) -> None:
        raise VllmFLError(_reason)


def refuse(reason: str) -> str:
    """Return the qualified name of a platform class that raises ``reason``."""
    global _reason
    _reason = reason
    return f"{UnusablePlatform.__module__}.{UnusablePlatform.__qualname__}"
