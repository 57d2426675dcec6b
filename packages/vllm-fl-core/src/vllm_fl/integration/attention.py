"""Choosing the attention backend: dispatch ranks, the backend class says what it cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.state import get_policy
from vllm_fl.dispatch.types import BackendImplKind, OpImpl, load_object
from vllm_fl.integration.handover import adopt

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = get_logger("vllm_fl.integration")
OPERATOR = "attention_backend"


class NoAttentionBackend(ValueError):
    """No implementation can serve a layer group; the message gives each one's reasons."""


def is_vllm_s_choice(selected: AttentionBackendEnum | None) -> bool:
    """Whether the user asked for a backend by a name that vLLM itself knows a class for."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return selected is not None and selected is not AttentionBackendEnum.CUSTOM


def is_user_s_order() -> bool:
    """Whether the policy names implementations for the operator, which then must work."""
    return get_policy().get_per_op_order(OPERATOR) is not None


def _stands_back(impl: OpImpl, platform: Any, selected: AttentionBackendEnum | None) -> bool:
    """Whether vLLM's own selection goes before an implementation.

    That is so for the plain PyTorch one, where vLLM has kernels and nobody asked for it.
    """
    return (
        impl.kind is BackendImplKind.REFERENCE
        and platform.vllm_has_attention
        and selected is None
        and not is_user_s_order()
        and get_policy().prefer != BackendImplKind.REFERENCE.value
    )


def select_backend(
    platform: Any,
    selected: AttentionBackendEnum | None,
    config: AttentionSelectorConfig,
) -> str:
    """Return the qualified name of the attention backend class for a layer group.

    The implementations of ``attention_backend`` are asked in the policy's order; the first whose
    class accepts the configuration is taken. What the user asked for with
    ``--attention-backend`` is taken or refused, never replaced.

    Args:
        platform: the platform class.
        selected: the user's choice; None for none.
        config: what the layers need.

    Raises:
        NoAttentionBackend: none can serve it.
    """
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    adopt(get_current_vllm_config())
    manager = get_default_manager()
    needs = {"use_mla": config.use_mla, "use_sparse": config.use_sparse}
    ranking = manager.rank(OPERATOR, call=((), needs))
    refusals = [f"  {impl.impl_id}: {decision.reason}" for impl, decision in ranking.rejected]
    strict = get_policy().strict
    for impl in ranking.order[:1] if strict else ranking.order:
        if _stands_back(impl, platform, selected):
            refusals.append(f"  {impl.impl_id}: vLLM's own attention backends go before it")
            continue
        try:
            reference = manager.function(impl)(**needs)
            backend = load_object(reference)
            name = backend.get_name()
            problems = backend.validate_configuration(
                device_capability=platform.get_device_capability(), **config._asdict()
            )
        except Exception as error:
            if strict:
                raise
            refusals.append(f"  {impl.impl_id}: {type(error).__name__}: {error}")
            logger.warning("%s of %s failed: %r", impl.impl_id, OPERATOR, error)
            continue
        if selected is not None and selected.name != name:
            problems = [f"it is {name}, and {selected.name} was asked for", *problems]
        if problems:
            refusals.append(f"  {impl.impl_id} ({name}, {reference}): {'; '.join(problems)}")
            continue
        path = str(reference).replace(":", ".")
        if name == AttentionBackendEnum.CUSTOM.name:
            register_backend(AttentionBackendEnum.CUSTOM, path)
        manager.note_use(impl)
        logger.info("Attention backend: %s (%s, %s)", path, impl.impl_id, impl.wheel or "by hand")
        return path
    asked = f" for --attention-backend {selected.name}" if selected is not None else ""
    raise NoAttentionBackend(
        f"No attention backend of vllm-fl can serve this model on the {platform.device_name} "
        f"platform{asked}.\n" + "\n".join(refusals) + f"\nWhat the model needs: {config}.\n"
        "Install a backend wheel that supports it, or change what the model needs or what was "
        "asked for."
    )
