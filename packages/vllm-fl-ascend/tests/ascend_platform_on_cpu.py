"""vLLM's CPU platform for the Ascend backend on emulated operators."""

from __future__ import annotations

from vllm_fl_reference.platform import CpuPlatformFL


class AscendOnCpu(CpuPlatformFL):
    """The CPU, whose device is served by the backend ``ascend``."""
