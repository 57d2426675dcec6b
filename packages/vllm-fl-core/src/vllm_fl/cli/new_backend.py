"""``vllm-fl new-backend NAME --out DIR``: write the wheel project of a new backend."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.scaffold.project import Project

DESCRIPTION = "Write a complete wheel project for a new backend; its README says how to go on."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, all but ``--json``, which every command has."""
    add = parser.add_argument
    add("name", metavar="NAME", help="the backend's name, as users write it in vendor:NAME")
    add("--import-name", metavar="PACKAGE", help="the Python package; default: vllm_fl_NAME")
    add("--with-attention", action="store_true", help="with an attention backend")
    add("--with-platform", action="store_true", help="with a device and its vLLM platform")
    add("--out", type=Path, required=True, metavar="DIR", help="a new or an empty folder")


def run(arguments: argparse.Namespace) -> str:
    """Write the project; return what to print.

    Raises:
        ConfigError: a name cannot be used, the folder holds something, or jinja2 is missing.
    """
    project = Project(
        arguments.name,
        arguments.import_name or f"vllm_fl_{arguments.name.replace('-', '_')}",
        attention=arguments.with_attention,
        platform=arguments.with_platform,
    )
    out: Path = arguments.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists and is not an empty folder; name another.")
    files = project.files()
    for path, text in files.items():
        target = out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    if arguments.json:
        return json.dumps({"out": str(out), "files": list(files)}, indent=2)
    listed = "\n".join(f"  {path}" for path in files)
    return (
        f"Written to {out}:\n{listed}\n\nNext: pip install -e {out}; "
        f"vllm-fl verify {project.name}; then replace what is marked VENDOR, as its README says."
    )
