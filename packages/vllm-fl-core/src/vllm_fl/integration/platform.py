"""PlatformFL: what every platform of vllm-fl adds to the vLLM platform that it inherits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm_fl.dispatch import env
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.types import load_object
from vllm_fl.integration import attention, custom_ops, handover, tuned

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

WORKER_EXTENSION = "vllm_fl.integration.worker.WorkerExtensionFL"


class PlatformFL:
    """Mixin for the platform class of a backend wheel; put it before vLLM's class.

    The class below it may keep the ``_enum`` of the vLLM platform that it inherits: what vLLM does
    for that platform by name, such as ``is_cuda()``, then stays as it is, and the dispatched
    layers run as ``forward_cuda``. A device that vLLM has no name for, or whose native paths need
    what is not there, sets ``_enum = PlatformEnum.OOT`` and gets ``forward_oot``.
    """

    vllm_has_attention: ClassVar[bool] = False
    """Whether the vLLM platform below selects among attention backends that run on this device.

    It is then asked for what the user names with ``--attention-backend``, and for what no
    implementation of ``attention_backend`` serves.
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
        parent: Any = super()
        if cls.vllm_has_attention and attention.is_vllm_s_choice(selected_backend):
            return parent.get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        try:
            return attention.select_backend(cls, selected_backend, attn_selector_config)
        except attention.NoAttentionBackend as refusal:
            if not cls.vllm_has_attention or selected_backend or attention.is_user_s_order():
                raise
            attention.logger.info("vLLM selects the attention backend. %s", refusal)
        return parent.get_attn_backend_cls(None, attn_selector_config, num_heads)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Let vLLM's platform adjust the configuration, then add what the workers need."""
        parent: Any = super()
        parent.check_and_update_config(vllm_config)
        parallel = vllm_config.parallel_config
        parallel.worker_extension_cls = _worker_extension(parallel.worker_extension_cls)
        _check_comparison(vllm_config)
        tuned.look_up(vllm_config)
        custom_ops.enable(vllm_config)
        handover.publish(vllm_config)


def _worker_extension(given: str) -> str:
    """Return the extension of vLLM's worker: the user's if it is one of vllm-fl's, too.

    Raises:
        ConfigError: it is not.
    """
    if given in ("", WORKER_EXTENSION):
        return WORKER_EXTENSION
    from vllm_fl.integration.worker import WorkerExtensionFL

    if not issubclass(load_object(":".join(given.rsplit(".", 1))), WorkerExtensionFL):
        raise ConfigError(
            f"worker_extension_cls={given!r}: vllm-fl needs its own extension in each worker; make "
            f"the class a subclass of {WORKER_EXTENSION}."
        )
    return given


def _check_comparison(vllm_config: VllmConfig) -> None:
    from vllm.config import CompilationMode

    mode = vllm_config.compilation_config.mode
    if env.COMPARE.read() and mode != CompilationMode.NONE:
        raise ConfigError(
            f"{env.COMPARE.name} compares in eager mode, and the compilation mode is {mode}: add "
            "--enforce-eager, or unset the variable."
        )
