"""PlatformFL: what every platform of vllm-fl adds to the vLLM platform that it inherits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import env
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.integration import attention, handover

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

WORKER_EXTENSION = "vllm_fl.integration.worker.WorkerExtensionFL"


class PlatformFL:
    """Mixin for the platform class of a backend wheel; put it before vLLM's class.

    The class below it must set ``_enum = PlatformEnum.OOT``, so that vLLM takes its out-of-tree
    paths: ``CustomOp.forward_oot`` and the hooks of this class.
    """

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """Return the attention backend that dispatch chooses for a layer group.

        Raises:
            ValueError: none can serve it; the message gives each one's reasons.
        """
        return attention.select_backend(cls, selected_backend, attn_selector_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Let vLLM's platform adjust the configuration, then add what the workers need."""
        parent: Any = super()
        parent.check_and_update_config(vllm_config)
        parallel = vllm_config.parallel_config
        if not parallel.worker_extension_cls:
            parallel.worker_extension_cls = WORKER_EXTENSION
        _check_comparison(vllm_config)
        handover.publish(vllm_config)


def _check_comparison(vllm_config: VllmConfig) -> None:
    from vllm.config import CompilationMode

    mode = vllm_config.compilation_config.mode
    if env.COMPARE.read() and mode != CompilationMode.NONE:
        raise ConfigError(
            f"{env.COMPARE.name} compares in eager mode, and the compilation mode is {mode}: add "
            "--enforce-eager, or unset the variable."
        )
