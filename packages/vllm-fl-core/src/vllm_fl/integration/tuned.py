"""Finding the tuned configuration for the model and device that vLLM was configured for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import config_file, env, state, tuned
from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.errors import ConfigError, VllmFLError
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.types import Decision
from vllm_fl.integration import plugin, startup

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.config import VllmConfig

logger = get_logger("vllm_fl.integration")

SHAPE = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "moe_intermediate_size", "num_experts", "num_experts_per_tok",
    "n_routed_experts", "n_group", "topk_group", "kv_lora_rank", "q_lora_rank",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim",
)  # fmt: skip
"""What of a model's configuration decides about its operators' shapes: not the number of layers."""


_found: Path | None = None


def facts(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return what a tuned configuration of this engine is for, as JSON-ready containers.

    "model" is its name; the rest is that of :class:`~vllm_fl.dispatch.tuned.Facts`.
    """
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    text = model.hf_text_config
    shape = {name: getattr(text, name, None) for name in SHAPE}
    shape = {name: value for name, value in shape.items() if value is not None}
    return {
        "model": model.model,
        "device": current_platform.get_device_name(),
        "shape": {
            "architecture": model.architectures[0],
            **shape,
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": str(model.quantization or ""),
            "tensor_parallel": vllm_config.parallel_config.tensor_parallel_size,
        },
        "versions": tuned.installed_versions(),
    }


def _facts(vllm_config: VllmConfig) -> tuned.Facts:
    found = facts(vllm_config)
    return tuned.Facts(found["device"], found["shape"], found["versions"])


def look_up(vllm_config: VllmConfig) -> None:
    """Use the tuned configuration that VLLM_FL_TUNED_DIR has for this model, if there is one.

    A policy that was set from Python stays in force. A tuned configuration that VLLM_FL_CONFIG or
    VLLM_FL_TUNED_FILE names is used in any case; what it was not measured on is said.
    """
    global _found
    if vllm_config.model_config is None:
        return
    named = env.CONFIG.read() or env.TUNED_FILE.read()
    folder = env.TUNED_DIR.read()
    if named is not None and named != _found:
        block = config_file.read_block(named)
        if block is not None:
            _warn(named, block, _facts(vllm_config))
        return
    if folder is None:
        return
    if state.get_policy() != state.current_config().policy():
        logger.info("%s is not searched: a policy was set from Python.", env.TUNED_DIR.name)
        return
    choice = tuned.choose(config_file.read_blocks(folder), _facts(vllm_config), _is_complete)
    _found = choice.path
    for reason in choice.refused:
        logger.warning("%s.", reason)
    for reason in choice.others:
        logger.info("%s.", reason)
    if _found is None:
        logger.info("%s has no configuration that is used for this model and device.", folder)
    else:
        logger.info("Operators are chosen by %s (tuned).", _found)
    state.use_tuned_file(_found)
    plugin.install_layers()  # where the model is built in this process; others read the file first


def _is_complete(path: Path) -> Decision:
    manager = get_default_manager()
    manager.ensure_initialized()
    orders = config_file.parse_file(config_file.read(path), str(path)).get("op_backends")
    return tuned.names_what_is_here(
        orders.value if orders is not None else {},
        lambda op_name, impl_id: manager.registry.get_implementation(op_name, impl_id) is not None,
    )


def _warn(named: Path, block: dict[str, Any], here: tuned.Facts) -> None:
    fits = tuned.is_for(block, here)
    if not fits:
        logger.warning("%s was tuned for another device or shape of model: %s.", named, fits.reason)
        return
    decision = tuned.decide(block, here) and _is_complete(named)
    if not decision:
        logger.warning("%s: %s.", named, decision.reason)


def configure(model: str, dtype: Any) -> None:
    """Let vLLM make its configuration for a model, and with it look for a tuned configuration.

    Raises:
        ConfigError: vLLM cannot be imported, finds no device, or refuses the model or the dtype.
    """
    startup.check_platform("--model")
    from vllm.engine.arg_utils import EngineArgs

    try:
        EngineArgs(model=model, dtype=dtype).create_engine_config()
    except VllmFLError:
        raise
    except (ImportError, OSError, ValueError) as error:
        raise _refusal(error, model, dtype) from error


def _refusal(error: Exception, model: str, dtype: Any) -> VllmFLError:
    """Return, in one line, why vLLM makes no configuration; an error of ours as it is."""
    refusal = startup.refusal(error)
    if refusal.ours is not None:
        return refusal.ours
    if refusal.argument == "dtype":
        return ConfigError(f"--dtype: vLLM does not take {dtype!r}: {refusal.reason}.")
    return ConfigError(
        f"--model: vLLM cannot be configured for {model!r} (dtype {dtype}): {refusal.reason}. "
        "Give a folder with a config.json or a model's name."
    )
