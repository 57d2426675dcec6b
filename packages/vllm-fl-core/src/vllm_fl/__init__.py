"""vllm-fl: one stock vLLM, many chips. These two functions are vLLM's entry points.

vLLM calls them in every process that it starts, more than once; both are idempotent, and
importing this module imports neither vLLM nor torch.
"""

from __future__ import annotations


def register() -> str | None:
    """Name the platform class for vLLM (entry point group ``vllm.platform_plugins``).

    Returns:
        The qualified name of the platform class of this machine's device, or None when no
        installed backend has a device here and vLLM should go on as if this were not installed.
    """
    from vllm_fl.integration.plugin import platform_class

    return platform_class()


def register_layers() -> None:
    """Put the dispatched layers in place of vLLM's (group ``vllm.general_plugins``)."""
    from vllm_fl.integration.plugin import install_layers

    install_layers()
