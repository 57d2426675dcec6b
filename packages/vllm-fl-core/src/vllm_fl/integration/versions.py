"""Which vLLM this version of vllm-fl works with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from packaging.version import InvalidVersion, Version

from vllm_fl.dispatch.errors import VllmFLError
from vllm_fl.dispatch.types import YES, Decision

OLDEST = Version("0.26")
NEWEST = Version("0.33")
SUPPORTED = f"{OLDEST} to {NEWEST}"


def vllm_version() -> Version:
    """Return the version of the installed vLLM, read from its metadata, not imported.

    Raises:
        PackageNotFoundError: vLLM is not installed.
    """
    return Version(version("vllm"))


def adapter_module(adapters: Mapping[str, str], version: Version) -> str:
    """Return which of several modules, one a range of vLLM versions, serves a version.

    Args:
        adapters: first version that a module serves -> module, the oldest first. It serves all
            versions up to the next entry.
        version: of vLLM.

    Raises:
        VllmFLError: the version is older than every entry.
    """
    release = Version(version.base_version)
    served = [module for first, module in adapters.items() if Version(first) <= release]
    if not served:
        raise VllmFLError(f"vLLM {version} is not supported: {next(iter(adapters))} is the oldest.")
    return served[-1]


def check_vllm() -> Decision:
    """Whether the installed vLLM is supported, and what to do if not."""
    try:
        installed = vllm_version()
    except PackageNotFoundError:
        return Decision.no(f"vLLM is not installed; vllm-fl works with vLLM {SUPPORTED}.")
    except (InvalidVersion, TypeError) as error:
        return Decision.no(f"vLLM's metadata has no version that can be read: {error}")
    if OLDEST.release <= installed.release[:2] <= NEWEST.release:
        return YES
    return Decision.no(
        f"vLLM {installed} is not supported by this vllm-fl, which works with vLLM {SUPPORTED}: "
        "install one of these, or another vllm-fl, or set VLLM_PLUGINS='' to run vLLM without it."
    )
