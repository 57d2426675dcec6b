"""The modes: ways to run vLLM, each an environment for its engine's process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_fl.dispatch.ops import CATALOGUE

NATIVE = "native"
CONTROL = "control"
DEFAULT = "default"
# What is named must run: an operator that flagos lacks is an error, not another's work.
_FLAGOS = {"op_backends": {op: ["flagos"] for op in CATALOGUE}}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "null": {"prefer": "vendor", "oot_whitelist": []},
    "vendor": {"prefer": "vendor"},
    "flagos": _FLAGOS,
    "flagos-gemm": {**_FLAGOS, "flagos_whitelist": [*CATALOGUE, "mm", "addmm", "bmm"]},
}


@dataclass(frozen=True)
class Mode:
    """A way to run vLLM.

    Attributes:
        name: what it is called in results.
        environ: what to set in its engine's environment.
        configuration: the text of the configuration that is in it; empty without.
    """

    name: str
    environ: dict[str, str]
    configuration: str = ""

    @classmethod
    def parse(cls, text: str, folder: Path) -> Mode:
        """Parse a mode's name, or NAME=FILE.yaml.

        Args:
            text: the name.
            folder: where a configuration is written.

        Raises:
            ValueError: there is no such mode, or the file that it names does not exist.
        """
        if text in (NATIVE, CONTROL):
            return cls(text, {"VLLM_PLUGINS": ""})
        if text == DEFAULT:
            return cls(text, {})
        name, given, file = text.partition("=")
        if given:
            path = Path(file).resolve()
            if not path.is_file():
                raise ValueError(f"mode {text!r}: there is no file {file!r}")
            return cls(name, {"VLLM_FL_CONFIG": str(path)}, path.read_text())
        if text not in CONFIGURATIONS:
            known = ", ".join((NATIVE, CONTROL, DEFAULT, *CONFIGURATIONS, "NAME=FILE.yaml"))
            raise ValueError(f"there is no mode {text!r}; the modes are {known}")
        path = folder / f"{text}.yaml"
        content = json.dumps(CONFIGURATIONS[text])  # JSON is YAML
        path.write_text(content)
        return cls(text, {"VLLM_FL_CONFIG": str(path)}, content)
