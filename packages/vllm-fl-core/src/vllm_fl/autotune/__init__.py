"""AutoTune: the implementations that make the whole model fastest, found by measurement.

    from vllm_fl.autotune import Options, tune
    found = tune(Options(model="Qwen/Qwen3-0.6B", workload="chat"))

Importing this module imports neither Optuna nor vLLM nor torch; tuning needs
``vllm-fl-core[autotune]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch.errors import ConfigError

if TYPE_CHECKING:
    from vllm_fl.autotune.options import Options, Progress
    from vllm_fl.autotune.tuner import Tuner

__all__ = ["Options", "Progress", "Tuner", "tune"]


def __getattr__(name: str) -> Any:
    if name in ("Options", "Progress", "Tuner"):
        try:
            from vllm_fl.autotune import tuner
        except ImportError as error:
            raise ConfigError(
                f"Tuning needs more packages ({error}): pip install 'vllm-fl-core[autotune]'"
            ) from error
        return getattr(tuner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def tune(options: Options, **callbacks: Any) -> dict[str, Any]:
    """Tune; return everything that is known about the study.

    Args:
        options: what to tune.
        callbacks: ``tell`` and ``progress`` of :class:`Tuner`.

    Returns:
        JSON-ready. "result" has "winner" (None: the default stays) and, for a winner, "file", the
        content of a configuration file.

    Raises:
        ConfigError: an option is not allowed, or a package is missing.
        TrialFailed: the default itself cannot run.
    """
    return __getattr__("Tuner")(options, **callbacks).tune()
