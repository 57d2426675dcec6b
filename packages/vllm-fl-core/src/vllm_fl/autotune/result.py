"""What tuning found, and the configuration file that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_fl.dispatch import tuned
from vllm_fl.dispatch.config import Config
from vllm_fl.dispatch.config_file import parse_file
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.oplist import write_atomically
from vllm_fl.dispatch.phases import lay_orders, nested_orders
from vllm_fl.dispatch.settings import BY_KEY, SETTINGS


def file_content(
    settings: Config, orders: Mapping[str, list[str]], block: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of a tuned configuration file.

    It holds the settings that tuning started from, defaults among them, so that it means the same
    alone and over any platform's defaults.

    Args:
        settings: the effective configuration during tuning.
        orders: operator (and phase) -> order tokens, of what was changed.
        block: what the file says about itself.
    """
    content: dict[str, Any] = {tuned.KEY: dict(block)}
    for setting in SETTINGS:
        value = settings[setting.key]
        # A white- and a blacklist do not go together; an empty blacklist cancels a whitelist
        # of the platform's defaults.
        superseded = (
            setting.cancels
            and settings[setting.cancels] != BY_KEY[setting.cancels].variable.default
        )
        if setting.parse is not None and value is not None and not superseded:
            content[setting.key] = list(value) if isinstance(value, tuple) else value
    content["op_backends"] = nested_orders(lay_orders(settings["op_backends"], orders))
    return content


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a tuned configuration, after checking that it can be read.

    Raises:
        ConfigError: it cannot be; a fault of the tuner.
    """
    import yaml

    text = "# Written by `vllm-fl autotune`: use it by VLLM_FL_CONFIG, or put it into the folder\n"
    text += "# of VLLM_FL_TUNED_DIR.\n" + yaml.safe_dump(dict(content), sort_keys=False)
    parse_file(text, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def check_switches(settings: Config) -> None:
    """Refuse to tune under a switch that a file cannot hold.

    Raises:
        ConfigError: the master switch, or that of the layers, is off.
    """
    for key in ("prefer_enabled", "use_flaggems", "oot_enabled"):
        if settings[key] is False:
            raise ConfigError(
                f"{settings.values[key].source} is off, which a configuration file cannot say; "
                "unset it to tune, or use flagos_whitelist and oot_whitelist."
            )
