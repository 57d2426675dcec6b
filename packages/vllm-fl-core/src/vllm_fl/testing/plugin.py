"""The pytest plugin: options, and the table at the end. Loaded with ``-p vllm_fl.testing.plugin``.

There is no entry point for it, so that pytest runs that have nothing to do with this project
import nothing of it.
"""

from __future__ import annotations

from typing import Any

import pytest  # type: ignore[import-not-found]

from vllm_fl.testing.tally import Tally

TALLY = pytest.StashKey[Tally]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("vllm-fl", "conformance of a vllm-fl backend")
    group.addoption("--fl-backend", metavar="NAME", help="backend or implementation to verify")
    group.addoption("--fl-device", metavar="DEVICE", help="torch device, e.g. cuda")
    group.addoption(
        "--fl-every", metavar="N", type=int, default=1, help="run each N-th of a check's cases"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start counting."""
    config.stash[TALLY] = Tally()
    config.pluginmanager.register(config.stash[TALLY], "vllm-fl-tally")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table, unless ``--no-summary`` asks for none, which pytest 9 leaves to plugins."""
    tally = config.stash[TALLY]
    if tally.counts and not config.getoption("no_summary"):
        terminalreporter.section("vllm-fl conformance")
        terminalreporter.write_line(tally.as_text())
