"""Random weights on which greedy tokens mean something, the same in every mode.

vLLM's own random weights are of the order of 1e-3, norms included, and equal in every layer, so
that all tokens are as likely as each other and bf16 has ties among them. Here matrices are normal
with the deviation that transformers initialises Qwen3 with, and norms are ones.

The load format is registered when a worker is made: a process that only looks at
:class:`Extension`, as vllm-fl's does before vLLM forks its engine, imports nothing more of vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import ModelConfig

LOAD_FORMAT = "random_normal"
DEVIATION = 0.02

_Base: Any = object
if type(current_platform).__module__.startswith("vllm_fl"):
    from vllm_fl.integration.worker import WorkerExtensionFL

    _Base = WorkerExtensionFL


class Extension(_Base):
    """vLLM's worker with nothing added but the load format."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Register the load format, then make the worker; its own ``__init__`` follows."""
        register()
        return super().__new__(cls)


def register() -> None:
    """Make the load format known to vLLM."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class RandomLoader(DummyModelLoader):
        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            fill(model)

    register_model_loader(LOAD_FORMAT)(RandomLoader)


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Fill a model in place; a parameter's values depend on its place, shape and type alone."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            generator = torch.Generator(device=parameter.device).manual_seed(number)
            parameter.normal_(0.0, DEVIATION, generator=generator)
