"""What vllm-fl adds to vLLM's worker, reached with ``LLM.collective_rpc``."""

from __future__ import annotations

from typing import Any

from vllm_fl.dispatch.manager import get_default_manager
from vllm_fl.dispatch.report import operator_table


class WorkerExtensionFL:
    """Mixed into vLLM's worker through ``parallel_config.worker_extension_cls``."""

    def fl_count_calls(self, enabled: bool = True) -> None:
        """Switch the counting of operator calls in this worker on or off."""
        get_default_manager().count_calls(enabled)

    def fl_operator_table(self) -> list[dict[str, Any]]:
        """Return one row an operator: what runs it here, from which wheel, how often called."""
        return operator_table(get_default_manager())
