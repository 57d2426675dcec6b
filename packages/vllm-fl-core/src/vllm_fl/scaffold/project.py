"""What ``vllm-fl new-backend`` writes: a pure function from a description to files."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from importlib.util import find_spec

from packaging.version import Version

from vllm_fl.dispatch.backend import BACKEND_API
from vllm_fl.dispatch.discovery import PLUGIN_GROUP
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.types import BackendImplKind

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_PACKAGE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_TAKEN = {kind.value for kind in BackendImplKind} | {"default"}


@dataclass(frozen=True)
class Project:
    """The project of one backend wheel.

    Attributes:
        name: the backend's name, which is the vendor's, too.
        import_name: the Python package.
        attention: with an attention backend for vLLM.
        platform: with a device and its vLLM platform.
    """

    name: str
    import_name: str
    attention: bool = False
    platform: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in _TAKEN:
            raise ConfigError(
                f"{self.name!r} cannot be a backend's name. Allowed: lower-case letters, digits, "
                f"'-' and '_' between them, a letter first, and none of "
                f"{', '.join(sorted(_TAKEN))}. Give another, as in acme."
            )
        word = self.import_name
        if not _PACKAGE.fullmatch(word) or keyword.iskeyword(word):
            raise ConfigError(
                f"{word!r} cannot be the import name. Allowed: lower-case letters, digits and '_' "
                "between them, a letter first, and no keyword of Python. Give another, as in "
                "--import-name vllm_fl_acme."
            )
        if word in sys.stdlib_module_names or _is_installed(word, self.name):
            raise ConfigError(
                f"{word!r} cannot be the import name: Python or an installed package has it, and "
                "the wheel would replace that. Give another, as in --import-name vllm_fl_acme."
            )

    @property
    def distribution(self) -> str:
        """The wheel's name on a package index."""
        return self.import_name.replace("_", "-")

    @property
    def title(self) -> str:
        """The name as a part of class names."""
        return "".join(part.capitalize() for part in re.split("[-_]", self.name))

    @property
    def core_range(self) -> str:
        """The versions of core that the project is written for, as a specifier."""
        core = Version(version("vllm-fl-core"))
        return f">={core.major}.{core.minor}.0.dev0,<{core.major}.{core.minor + 1}"

    def paths(self) -> Iterator[tuple[str, str]]:
        """Yield (template, path in the project) of each file."""
        package = f"src/{self.import_name}"
        yield "pyproject.toml", "pyproject.toml"
        yield "README.md", "README.md"
        yield "py.typed", f"{package}/py.typed"
        yield "init.py", f"{package}/__init__.py"
        yield "backend.py", f"{package}/backend.py"
        yield "defaults.yaml", f"{package}/{self.name}.yaml"
        yield "impl/init.py", f"{package}/impl/__init__.py"
        yield "impl/activation.py", f"{package}/impl/activation.py"
        yield "impl/norm.py", f"{package}/impl/norm.py"
        yield "impl/rotary.py", f"{package}/impl/rotary.py"
        if self.attention:
            yield "impl/attention.py", f"{package}/impl/attention.py"
            yield "attention.py", f"{package}/attention.py"
        if self.platform:
            yield "platform.py", f"{package}/platform.py"
        yield "tests/test_backend.py", "tests/test_backend.py"
        yield "tests/test_conformance.py", "tests/test_conformance.py"

    def files(self) -> dict[str, str]:
        """Return path in the project -> text.

        Raises:
            ConfigError: jinja2 is not installed.
        """
        try:
            import jinja2
        except ImportError as error:
            raise ConfigError(
                f"`vllm-fl new-backend` needs jinja2 ({error}): "
                "pip install 'vllm-fl-core[new-backend]'"
            ) from error
        templates = jinja2.Environment(
            loader=jinja2.PackageLoader("vllm_fl.scaffold"),
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        return {
            path: templates.get_template(f"{template}.jinja").render(p=self, api=BACKEND_API)
            for template, path in self.paths()
        }


def _is_installed(import_name: str, backend: str) -> bool:
    """Whether a package other than an earlier version of this backend's has the name."""
    spec = find_spec(import_name)
    if spec is None or spec.origin is None:  # without an origin it is just a folder of that name
        return False
    entries = entry_points(group=PLUGIN_GROUP, name=backend)
    return import_name not in {entry.module.partition(".")[0] for entry in entries}
