"""A machine with an Ascend installation, made up of files in a folder."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

HERE = Path(__file__).parent
EMULATOR = HERE / "emulator"
ROOT_VARIABLE = "EMULATED_ASCEND_ROOT"


def torch_release() -> str:
    """The installed torch's version without what follows a plus."""
    return Version(version("torch")).base_version


def make_machine(
    folder: Path,
    *,
    torch_npu: str | None = None,
    package: bool = True,
    npus: int = 2,
    cann: bool = True,
    libraries: bool = True,
    driver_library: bool = True,
) -> dict[str, str]:
    """Make the files; return the environment of a process on that machine.

    Args:
        folder: where the files go.
        torch_npu: the version that torch_npu says it has; None for that of torch, "" for none.
        package: whether torch_npu's package is there.
        npus: how many NPUs there are.
        cann: whether CANN is installed.
        libraries: whether its ``set_env.sh`` was sourced.
        driver_library: whether the driver's libraries are there.
    """
    site, root = folder / "site", folder / "root"
    for path in (site, root / "dev"):
        path.mkdir(parents=True)
    if torch_npu != "":
        wanted = torch_npu or torch_release()
        info = site / f"torch_npu-{wanted}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {wanted}\n"
        )
    (root / "dev" / "davinci_manager").touch()
    for number in range(npus):
        (root / "dev" / f"davinci{number}").touch()
    driver = root / "usr/local/Ascend/driver"
    driver.mkdir(parents=True)
    if driver_library:
        (driver / "lib64/driver").mkdir(parents=True)
        (driver / "lib64/driver/libascend_hal.so").touch()
    (driver / "version.info").write_text("Version=25.2.0\npackage_version=25.2.0\n")
    paths = [str(HERE), str(site)] + ([str(EMULATOR)] if package else [])
    environ = {ROOT_VARIABLE: str(root), "PYTHONPATH": os.pathsep.join(paths)}
    if cann:
        home = root / "usr/local/Ascend/ascend-toolkit/latest"
        (home / "x86_64-linux").mkdir(parents=True)
        info = home / "x86_64-linux" / "ascend_toolkit_install.info"
        info.write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\narch=x86_64\n")
        (home / "lib64").mkdir()
        (home / "lib64" / "libhccl.so").touch()
        if libraries:
            environ["LD_LIBRARY_PATH"] = str(home / "lib64")
    return environ


def use_machine(environ: dict[str, str], patch) -> None:
    """Put this process on a machine that :func:`make_machine` made."""
    from vllm_fl_ascend import installation

    patch.setattr(installation, "ROOT", Path(environ[ROOT_VARIABLE]))
    for name in (*installation.CANN_VARIABLES, installation.VISIBLE, "LD_LIBRARY_PATH"):
        patch.delenv(name, raising=False)
    if "LD_LIBRARY_PATH" in environ:
        patch.setenv("LD_LIBRARY_PATH", environ["LD_LIBRARY_PATH"])
    for path in environ["PYTHONPATH"].split(os.pathsep):
        patch.syspath_prepend(path)
