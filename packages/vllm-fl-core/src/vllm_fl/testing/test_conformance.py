"""What ``pytest --pyargs vllm_fl.testing`` collects: every case of ``--fl-backend``."""

from __future__ import annotations

from collections.abc import Callable

import pytest  # type: ignore[import-not-found]

from vllm_fl.dispatch.errors import VllmFLError
from vllm_fl.testing import suite
from vllm_fl.testing.target import find_target

PLUGIN = "vllm_fl.testing.plugin"
HOW = f"Name the backend: pytest -p {PLUGIN} --pyargs vllm_fl.testing --fl-backend=NAME"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of every case."""
    if not metafunc.config.pluginmanager.has_plugin(PLUGIN):  # collected in passing
        metafunc.parametrize("item", [pytest.param(None, marks=pytest.mark.skip(reason=HOW))])
        return
    name = metafunc.config.getoption("--fl-backend")
    if name is None:
        raise pytest.UsageError(HOW)
    try:
        target = find_target(name, metafunc.config.getoption("--fl-device"))
        every = metafunc.config.getoption("--fl-every")
        metafunc.parametrize("item", suite.sample(suite.parameters(target), every))
    except VllmFLError as error:
        raise pytest.UsageError(str(error)) from error


def test_conformance(item: suite.Item, record_property: Callable[[str, object], None]) -> None:
    """Run one case."""
    suite.run(item, record_property)
