"""What is installed for Ascend on this machine, read from files: nothing is imported or opened.

torch_npu cannot be imported where CANN's libraries are missing, and importing it where they are
present reserves the device; so whether it can be used is told from what lies on the disk.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_fl.dispatch.types import YES, Decision

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""What CANN's ``set_env.sh`` sets to the folder of the installation."""

ROOT = Path("/")
"""Where the paths below start."""

_CANN = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest")
_DRIVER = "usr/local/Ascend/driver/version.info"
_DRIVER_LIBRARIES = ("usr/local/Ascend/driver/lib64/driver", "usr/lib64", "usr/lib")
# The first libraries of the driver and of CANN that torch_npu misses when it is imported.
_DRIVER_LIBRARY, _LIBRARY = "libascend_hal.so", "libhccl.so"
_VERSION_LINE = re.compile(r"^\s*version\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)


def detect() -> Decision:
    """Whether vLLM and torch can use an NPU here, and why not."""
    for check in (_check_device, _check_torch_npu, _check_cann, _check_driver):
        decision = check()
        if not decision:
            return decision
    return YES


def versions() -> dict[str, str | None]:
    """Return the versions of the driver, CANN, torch_npu and torch; None for what is missing."""
    home = cann_home()
    infos = sorted(home.glob("*-linux/ascend_*_install.info")) if home is not None else []
    return {
        "driver": _version_in(ROOT / _DRIVER),
        "CANN": next(filter(None, map(_version_in, infos)), None),
        "CANN home": None if home is None else str(home),
        "torch_npu": _installed("torch-npu"),
        "torch": _installed("torch"),
    }


def visible_devices() -> list[int] | None:
    """Return the devices that ASCEND_RT_VISIBLE_DEVICES leaves; None when it is not set.

    As torch_npu reads it: digits and commas up to the first other character.
    """
    text = os.environ.get(VISIBLE)
    if text is None:
        return None
    digits = re.match(r"[\d,]*", text)
    return [int(n) for n in digits[0].split(",") if n] if digits else []


def cann_home() -> Path | None:
    """Return the folder of CANN that the environment names, or a usual one that exists."""
    named = [os.environ[name] for name in CANN_VARIABLES if os.environ.get(name)]
    usual = [ROOT / path for path in _CANN]
    candidates = [Path(path) for path in named] or usual
    return next((path for path in candidates if path.is_dir()), None)


def _check_device() -> Decision:
    present = sorted(
        int(path.name.removeprefix("davinci"))
        for path in (ROOT / "dev").glob("davinci*")
        if path.name.removeprefix("davinci").isdigit()
    )
    if not present:
        return Decision.no("there is no NPU: no /dev/davinci0 or other")
    wanted = visible_devices()
    if wanted is None:
        return YES
    if not wanted:
        return Decision.no(f"{VISIBLE}={os.environ[VISIBLE]!r} hides every NPU")
    # In a container the files have the numbers of the host, the variable those from 0 on.
    if wanted[0] >= len(present) and wanted[0] not in present:
        return Decision.no(
            f"{VISIBLE}={os.environ[VISIBLE]!r} names none of the {len(present)} NPUs here"
        )
    return YES


def _check_torch_npu() -> Decision:
    installed, torch = _installed("torch-npu"), _installed("torch")
    if installed is None:
        return Decision.no("torch_npu is not installed")
    if find_spec("torch_npu") is None:
        return Decision.no(f"torch_npu {installed} is broken: its package cannot be found")
    if torch is None:
        return Decision.no("torch is not installed")
    try:
        theirs, ours = Version(installed).release[:2], Version(torch).release[:2]
    except InvalidVersion as error:
        return Decision.no(f"a version cannot be read: {error}")
    if theirs != ours:
        needed = ".".join(map(str, theirs))
        return Decision.no(
            f"torch_npu {installed} is made for torch {needed}, and torch {torch} is installed"
        )
    return YES


def _check_cann() -> Decision:
    home = cann_home()
    named = [f"{name}={os.environ[name]!r}" for name in CANN_VARIABLES if os.environ.get(name)]
    if home is None:
        where = f"{named[0]} is no folder" if named else "it is not in /usr/local/Ascend"
        return Decision.no(f"CANN is missing: {where}. Install it and source its set_env.sh")
    if not _is_in(_LIBRARY, _library_path()):
        return Decision.no(
            f"CANN's libraries are not on LD_LIBRARY_PATH ({_LIBRARY} is not found): "
            f"source {home}/set_env.sh"
        )
    return YES


def _check_driver() -> Decision:
    if _is_in(_DRIVER_LIBRARY, _library_path(), [ROOT / path for path in _DRIVER_LIBRARIES]):
        return YES
    return Decision.no(
        f"the driver's {_DRIVER_LIBRARY} is not found: install the driver, or mount "
        f"/{_DRIVER.rpartition('/')[0]} into the container"
    )


def _library_path() -> list[Path]:
    """Return the folders that the dynamic linker looks into before the system's."""
    configured = sorted((ROOT / "etc/ld.so.conf.d").glob("*.conf"))
    named = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    lines = [line for file in configured for line in file.read_text().splitlines()]
    return [Path(name) for name in named if name] + [
        ROOT / line.strip().lstrip("/") for line in lines if line.startswith("/")
    ]


def _is_in(library: str, *folders: list[Path]) -> bool:
    return any((folder / library).is_file() for group in folders for folder in group)


def _version_in(path: Path) -> str | None:
    """Return what a file of CANN or the driver says after "version="."""
    try:
        found = _VERSION_LINE.search(path.read_text(errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
