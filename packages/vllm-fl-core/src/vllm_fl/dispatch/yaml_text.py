"""Reading YAML in which a mapping gives each key once. Needs PyYAML, which is slow to import."""

from __future__ import annotations

from typing import Any

import yaml

from vllm_fl.dispatch.errors import ConfigError


def parse(text: str, source: str) -> dict[Any, Any]:
    """Return the mapping that a text holds; an empty text holds an empty one.

    Raises:
        ConfigError: not YAML, not a mapping, or a key is given twice.
    """
    try:
        content = yaml.load(text, _Loader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"{source} is not YAML: {error}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{source} must hold a mapping of settings, not {content!r}.")
    return content


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which would take the last value of a key that is given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping as it is written, before it takes over keys of others."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise ConfigError(
                        f"{key.value} is given twice: lines {lines[key.value]}, {line}. Keep one."
                    )
                lines[key.value] = line
        return node
