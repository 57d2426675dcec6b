"""Step 1: the Backend class, with name, vendor, is_available and one method an operator."""

from __future__ import annotations

import importlib.util

from vllm_fl.dispatch import Backend


class BoltBackend(Backend):
    """Computes with PyTorch, which stands for Bolt's library."""

    _available: bool | None = None

    @property
    def name(self) -> str:
        """The backend's name."""
        return "bolt"

    @property
    def vendor(self) -> str:
        """The vendor's name."""
        return "bolt"

    def is_available(self) -> bool:
        """Whether Bolt's library is installed."""
        if BoltBackend._available is None:
            BoltBackend._available = importlib.util.find_spec("torch") is not None
        return BoltBackend._available

    def silu_and_mul(self, x):
        """SwiGLU activation."""
        from vllm_fl_bolt.impl.activation import silu_and_mul_bolt

        return silu_and_mul_bolt(x)

    def rms_norm(self, x, residual, weight, epsilon):
        """Root-mean-square normalisation."""
        from vllm_fl_bolt.impl.normalization import rms_norm_bolt

        return rms_norm_bolt(x, residual, weight, epsilon)
