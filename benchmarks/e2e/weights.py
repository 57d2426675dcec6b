"""Random weights on which greedy tokens mean something, the same in every mode.

vLLM's own random weights are of the order of 1e-3, norms included, and equal in every layer, so
that all tokens are as likely as each other and bf16 has ties among them. Here matrices are normal
with the deviation that transformers initialises Qwen3 with, and norms are ones.

vLLM's workers import this module for :class:`Extension`, and with it they know the load format.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.platforms import current_platform

DEVIATION = 0.02

_Base: Any = object
if type(current_platform).__module__.startswith("vllm_fl"):
    from vllm_fl.integration.worker import WorkerExtensionFL

    _Base = WorkerExtensionFL


class Extension(_Base):
    """vLLM's worker with nothing added but this module's load format."""


@register_model_loader("random_normal")
class RandomLoader(DummyModelLoader):
    """Fills a model; a parameter's values depend on its place, shape and type alone."""

    @torch.no_grad()
    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Fill the parameters in place."""
        for number, parameter in enumerate(model.parameters()):
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator(device=parameter.device).manual_seed(number)
                parameter.normal_(0.0, DEVIATION, generator=generator)
