"""The Ascend backend with its device being the CPU, on which torch_npu is emulated.

It is a plug-in of vllm-fl (VLLM_FL_PLUGIN_MODULES), which imports it in every process, and of
pytest. The process must be on a machine of :func:`machine.make_machine`; detection, availability
and the defaults file are the real ones.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from machine import ROOT_VARIABLE

from vllm_fl_ascend import device, installation
from vllm_fl_ascend.backend import AscendBackend

installation.ROOT = Path(os.environ[ROOT_VARIABLE])
device.DEVICE = "cpu"
AscendBackend.device = replace(
    AscendBackend.device, name="cpu", platform="ascend_platform_on_cpu:AscendOnCpu"
)


def register_builtins(registry: object) -> None:
    """Nothing is registered: the operators are those of the wheel."""
