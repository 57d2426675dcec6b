"""What a user sees with wheels missing, and that the wheels hold what they should."""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

WHEELS = ("vllm-fl-core", "vllm-fl-reference")


def copy_installed(distribution: str, site: Path) -> None:
    """Install a wheel of this environment into another site-packages folder."""
    for file in metadata.distribution(distribution).files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(Path(file.locate()).read_bytes())


@pytest.fixture
def python_with_core_alone(tmp_path) -> Path:
    """An environment with vLLM and vllm-fl-core, and no backend."""
    folder = tmp_path / "env"
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    copy_installed("vllm-fl-core", site)
    vllm = Path(metadata.distribution("vllm").locate_file(""))
    (site / "vllm.pth").write_text(f"{vllm}\n")
    return folder / "bin" / "python"


def test_without_a_backend_one_sentence_names_what_to_install(python_with_core_alone):
    done = subprocess.run(
        [python_with_core_alone, "-c", "import vllm.platforms as p; p.current_platform"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "vllm_fl.dispatch.errors.VllmFLError: vllm-fl-core is installed, but no backend wheel:"
    )
    assert "pip install vllm-fl-reference" in last


def test_without_a_backend_an_operator_says_the_same(python_with_core_alone):
    code = "from vllm_fl.dispatch import call_op; call_op('silu_and_mul', 1)"
    done = subprocess.run(
        [python_with_core_alone, "-c", code], capture_output=True, text=True, check=False
    )
    assert "No implementation of 'silu_and_mul' may run." in done.stderr
    assert "vllm-fl-reference has every operator" in done.stderr


@pytest.mark.parametrize("name", WHEELS)
def test_a_wheel_holds_what_it_should(name):
    distribution = metadata.distribution(name)
    files = {str(file) for file in distribution.files or ()}
    package = "vllm_fl" if name == "vllm-fl-core" else name.replace("-", "_")
    assert f"{package}/py.typed" in files
    assert any(file.endswith("licenses/LICENSE") for file in files)
    assert distribution.metadata["Requires-Python"] == ">=3.10"
    root = Path(__file__).parent.parent
    assert distribution.version == (root / "VERSION").read_text().strip()
    installed = Path(distribution.locate_file(package)).resolve()
    assert root / "packages" not in installed.parents, "the tree is tested, not the wheel"
    assert Path(sys.prefix).resolve() in installed.parents


def test_a_backend_s_core_range_holds_this_version_and_not_the_next():
    from packaging.requirements import Requirement
    from packaging.version import Version

    version = Version(metadata.version("vllm-fl-core"))
    following = f"{version.major}.{version.minor + 1}.0.dev0"
    for name in WHEELS[1:]:
        (needed,) = (
            Requirement(line)
            for line in metadata.requires(name) or ()
            if line.startswith("vllm-fl-core")
        )
        assert needed.specifier.contains(version, prereleases=True)
        assert not needed.specifier.contains(following, prereleases=True)


@pytest.mark.parametrize("group", ["vllm.platform_plugins", "vllm.general_plugins"])
def test_only_core_plugs_into_vllm(group):
    ours = [e for e in metadata.entry_points(group=group) if e.dist.name.startswith("vllm-fl")]
    assert [(entry.name, entry.dist.name) for entry in ours] == [("fl", "vllm-fl-core")]
    assert callable(ours[0].load())
