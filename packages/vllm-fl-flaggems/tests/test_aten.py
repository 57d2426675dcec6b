"""Whether flag_gems runs ATen operators, and which: decisions that need no flag_gems."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fl.dispatch import ConfigError, SelectionPolicy, UnknownOperatorError
from vllm_fl.dispatch import config as configuration
from vllm_fl.dispatch.usage import Usage
from vllm_fl_flaggems.backend import FlagGemsBackend
from vllm_fl_flaggems.gems import aten, mends, start
from vllm_fl_flaggems.gems.source import Entry, Installed

FOUND = Installed(
    "5.0.2",
    (
        Entry("add.Tensor", "add"),
        Entry("mm", "mm"),
        Entry("mm.out", "mm_out"),
        Entry("_softmax", "softmax"),
        Entry("rms_norm", "rms_norm"),
        Entry("exponential_", "exponential_"),
        Entry("index.Tensor", "index"),
    ),
)
OFFERED = {"mm", "mm.out", "_softmax", "rms_norm"}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend that discovery finds answers for this flag_gems."""
    monkeypatch.setattr(FlagGemsBackend, "knows", lambda self, name: aten.knows(FOUND, name))


def asked(**environ: str) -> str:
    config = configuration.load(environ=environ)
    return aten.is_asked_for(config, config.policy()).reason


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "USE_FLAGGEMS is not set, and flagos_whitelist names no ATen operator"),
        ({"USE_FLAGGEMS": "1"}, ""),
        ({"USE_FLAGGEMS": "0"}, "the default backend is off"),
        ({"USE_FLAGGEMS": "1", "VLLM_FL_PREFER_ENABLED": "0"}, "the default backend is off"),
        ({"USE_FLAGGEMS": "0", "VLLM_FL_FLAGOS_WHITELIST": "mm"}, "the default backend is off"),
        ({"VLLM_FL_FLAGOS_WHITELIST": "rms_norm,mm"}, ""),
        (
            {"VLLM_FL_FLAGOS_WHITELIST": "rms_norm"},
            "USE_FLAGGEMS is not set, and flagos_whitelist names no ATen operator",
        ),
        (
            {"VLLM_FL_FLAGOS_BLACKLIST": "mm"},
            "USE_FLAGGEMS is not set, and flagos_whitelist names no ATen operator",
        ),
    ],
)
def test_when_it_is_asked_for(environ: dict[str, str], reason: str) -> None:
    assert asked(**environ) == reason


@pytest.mark.parametrize(
    ("lists", "keys"),
    [
        ({}, OFFERED),
        ({"flagos_blacklist": ["mm"]}, OFFERED - {"mm", "mm.out"}),
        ({"flagos_blacklist": ["mm.out", "softmax"]}, {"mm", "rms_norm"}),
        ({"flagos_blacklist": ["mm_out", "silu_and_mul"]}, OFFERED - {"mm.out"}),
        ({"flagos_whitelist": ["mm"]}, {"mm", "mm.out"}),
        ({"flagos_whitelist": ["rms_norm", "_softmax"]}, {"rms_norm", "_softmax"}),
        ({"flagos_whitelist": ["index", "add"]}, {"index.Tensor", "add.Tensor"}),
        ({"flagos_whitelist": ["silu_and_mul"]}, set()),
    ],
)
def test_what_the_lists_choose(lists: dict[str, list[str]], keys: set[str]) -> None:
    selection = aten.select(FOUND, SelectionPolicy.from_dict(**lists))
    assert selection.keys == keys
    assert selection.named == (keys if "flagos_whitelist" in lists else set())


def test_what_is_declined_has_a_reason() -> None:
    declined = aten.select(FOUND, SelectionPolicy()).declined or {}
    assert set(declined) == {"add.Tensor", "exponential_", "index.Tensor"}
    assert "32 bits" in declined["index.Tensor"]
    assert all(aten.DECLINED.values())


@pytest.mark.parametrize("key", ["flagos_whitelist", "flagos_blacklist"])
def test_a_name_that_nobody_knows_is_an_error(key: str) -> None:
    with pytest.raises(UnknownOperatorError, match="'addd'") as caught:
        SelectionPolicy.from_dict(**{key: ["mm", "addd"]})
    assert "flag_gems 5.0.2 has no ATen operator of that name. Did you mean 'add'?" in str(
        caught.value
    )


def test_without_flag_gems_its_names_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlagGemsBackend, "knows", lambda self, name: aten.knows(None, name))
    with pytest.raises(UnknownOperatorError, match=r"flag_gems, whose ATen .* is not installed"):
        SelectionPolicy(flagos_blacklist=["mm"])  # type: ignore[arg-type]
    assert SelectionPolicy(flagos_blacklist=["rms_norm"])  # type: ignore[arg-type]


class Worker:
    """What start.py uses of the module that imports flag_gems."""

    class Unavailable(Exception):
        """As in the module."""

    def __init__(self) -> None:
        self.selections: list[aten.Selection] = []

    def enable(self, found: Installed, selection: aten.Selection) -> Any:
        """Enable nothing."""
        self.selections.append(selection)
        functions = dict.fromkeys(selection.keys, test_what_the_lists_choose)
        return SimpleNamespace(functions=functions, refused={"sort": "it is slow"})


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Worker:
    import sys

    import vllm_fl_flaggems.gems as package

    module: Any = Worker()
    monkeypatch.setitem(sys.modules, "vllm_fl_flaggems.gems.worker", module)
    monkeypatch.setattr(package, "worker", module, raising=False)
    monkeypatch.setattr(start, "installed", lambda: FOUND)
    monkeypatch.setattr(start, "OPLIST", tmp_path / "oplist.txt")
    monkeypatch.setattr(start, "get_default_manager", lambda: MANAGER)
    MANAGER.usage.oplist = None
    return module


MANAGER = SimpleNamespace(usage=Usage())


@pytest.fixture
def log() -> Iterator[list[str]]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    start.logger.addHandler(handler)
    yield texts
    start.logger.removeHandler(handler)


def begin(monkeypatch: pytest.MonkeyPatch, rank: int = 0, **environ: str) -> None:
    config = configuration.load(environ=environ)
    monkeypatch.setattr(start.state, "current_config", lambda: config)
    monkeypatch.setattr(start.state, "get_global_policy", config.policy)
    start.start(rank)


def test_the_choice_is_enabled_and_listed(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, tmp_path: Path, log: list[str]
) -> None:
    planted = tmp_path / "oplist.txt"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    planted.symlink_to(victim)
    begin(monkeypatch, USE_FLAGGEMS="1", VLLM_FL_FLAGOS_BLACKLIST="rms_norm,mm.out")
    assert worker.selections[0].keys == {"mm", "_softmax"}
    name = f"{__name__}.test_what_the_lists_choose"
    assert planted.read_text().splitlines() == [
        f"[DEBUG] {name}: aten::_softmax",
        f"[DEBUG] {name}: aten::mm",
    ]
    assert not planted.is_symlink()
    assert victim.read_text() == "precious"
    assert log == [
        "flag_gems' sort is not enabled: it is slow.",
        f"flag_gems 5.0.2 runs 2 ATen operators; they are listed in {planted}.",
    ]


def test_only_rank_0_lists_them(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, tmp_path: Path
) -> None:
    begin(monkeypatch, rank=1, USE_FLAGGEMS="1")
    assert worker.selections
    assert list(tmp_path.iterdir()) == []


def test_an_operator_list_that_cannot_be_written_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, tmp_path: Path
) -> None:
    monkeypatch.setattr(start, "OPLIST", tmp_path / "missing" / "oplist.txt")
    begin(monkeypatch, USE_FLAGGEMS="1")
    assert worker.selections


def test_not_asked_for_nothing_happens(monkeypatch: pytest.MonkeyPatch, worker: Worker) -> None:
    begin(monkeypatch)
    begin(monkeypatch, USE_FLAGGEMS="0")
    assert worker.selections == []


REASONS = {
    "batch": "VLLM_BATCH_INVARIANT is set, and flag_gems' products tune by the batch",
    "missing": "flag_gems is not installed (pip install --no-deps flag-gems)",
    "no device": "no device for Triton",
    "cpu": "vLLM runs on the CPU here, flag_gems on accelerators",
    "import": "flag_gems 5.0.2 cannot be imported here: OSError: libcuda.so",
}


def prevent(monkeypatch: pytest.MonkeyPatch, worker: Worker, obstacle: str) -> None:
    def fail(found: Installed, selection: aten.Selection) -> None:
        raise worker.Unavailable(REASONS["import"])

    if obstacle == "batch":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    elif obstacle == "missing":
        monkeypatch.setattr(start, "installed", lambda: None)
    elif obstacle == "no device":
        monkeypatch.setattr(
            start, "triton_availability", lambda: start.Decision.no(REASONS[obstacle])
        )
    elif obstacle == "cpu":
        device = SimpleNamespace(device=SimpleNamespace(name="cpu"))
        monkeypatch.setattr(start.state, "current_device", lambda: device)
        monkeypatch.setattr(start, "interpreted", lambda: False)
    else:
        monkeypatch.setattr(worker, "enable", fail)


@pytest.mark.parametrize("obstacle", REASONS)
def test_what_cannot_be_had_is_told_once(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, log: list[str], obstacle: str
) -> None:
    prevent(monkeypatch, worker, obstacle)
    begin(monkeypatch, USE_FLAGGEMS="1")
    begin(monkeypatch, rank=1, USE_FLAGGEMS="1")
    text = f"PyTorch's own ATen operators run, not flag_gems': {REASONS[obstacle]}."
    assert log == [text]


@pytest.mark.parametrize("obstacle", REASONS)
@pytest.mark.parametrize(
    "environ",
    [{"USE_FLAGGEMS": "1", "VLLM_FL_STRICT": "1"}, {"VLLM_FL_FLAGOS_WHITELIST": "mm"}],
    ids=["strict", "named"],
)
def test_what_must_be_had_is_an_error(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, environ: dict[str, str], obstacle: str
) -> None:
    prevent(monkeypatch, worker, obstacle)
    with pytest.raises(ConfigError, match="PyTorch's own ATen operators run") as caught:
        begin(monkeypatch, **environ)
    assert REASONS[obstacle] in str(caught.value)


@pytest.mark.parametrize(
    ("triton", "version", "launcher", "usable"),
    [
        ((3, 6), "9.0", "anything", True),
        ((3, 7), "5.0.2", "3 <= minor_version <= 6", True),
        ((3, 9), "9.0", "3 <= minor_version <= 6", True),
        ((3, 7), "9.0", "_keep_const_in_kargs", False),
    ],
)
def test_a_launcher_that_nobody_has_tested_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    triton: tuple[int, int],
    version: str,
    launcher: str,
    usable: bool,
) -> None:
    monkeypatch.setattr(mends, "triton_version", lambda: triton)
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "libentry.py").write_text(launcher)
    decision = mends.usable(Installed(version, (), tmp_path))
    assert bool(decision) is usable
    assert usable or "install flag_gems 5.0.2" in decision.reason
