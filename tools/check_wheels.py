"""Check the wheels and source archives of a release: contents and metadata.

python tools/check_wheels.py [DIST]
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
CORE = "vllm-fl-core"


def faults_of_wheel(path: Path, version: Version) -> Iterator[str]:
    """Yield what is wrong with a wheel of the release of this version."""
    name, found, python, abi, platform = path.stem.split("-")
    if (python, abi, platform) != ("py3", "none", "any"):
        yield f"is tagged {python}-{abi}-{platform}, and holds Python code only"
    if Version(found) != version:
        yield f"has version {found}, and VERSION says {version}"
    package = "vllm_fl" if name == "vllm_fl_core" else name
    with zipfile.ZipFile(path) as wheel:
        files = set(wheel.namelist())
        info = f"{name}-{found}.dist-info"
        licence = f"{info}/licenses/LICENSE"
        if licence not in files or wheel.read(licence) != (ROOT / "LICENSE").read_bytes():
            yield "has no licence, or not the project's"
        if f"{package}/py.typed" not in files:
            yield "has no py.typed"
        strange = [f for f in files if not f.startswith((f"{package}/", f"{info}/"))]
        if strange:
            yield f"holds files outside of {package}: {', '.join(sorted(strange))}"
        yield from faults_of_metadata(message_from_bytes(wheel.read(f"{info}/METADATA")), version)


def faults_of_metadata(metadata: Message, version: Version) -> Iterator[str]:
    """Yield what is wrong with the metadata of a wheel of the release of this version."""
    expected = {"Requires-Python": ">=3.10", "License-Expression": "Apache-2.0"}
    for field, value in expected.items():
        if metadata[field] != value:
            yield f"has {field}: {metadata[field]}, not {value}"
    if not metadata.get_payload():
        yield "has no description"
    following = f"{version.major}.{version.minor + 1}.0.dev0"
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
    for needed in requirements:
        if needed.url:
            yield f"requires a file, {needed}"
    on_core = [needed for needed in requirements if needed.name == CORE]
    if metadata["Name"] != CORE and not on_core:
        yield f"does not require {CORE}"
    for needed in on_core:
        if not needed.specifier.contains(version, prereleases=True):
            yield f"requires {needed}, which leaves out {version}"
        if needed.specifier.contains(following, prereleases=True):
            yield f"requires {needed}, which lets in {following}"


def main() -> int:
    """Check every file; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dist", nargs="?", type=Path, default=ROOT / "dist")
    dist: Path = parser.parse_args().dist
    version = Version((ROOT / "VERSION").read_text().strip())
    stems = sorted(p.parent.name.replace("-", "_") for p in ROOT.glob("packages/*/pyproject.toml"))
    faults = []
    for stem in stems:
        wheel = dist / f"{stem}-{version}-py3-none-any.whl"
        archive = dist / f"{stem}-{version}.tar.gz"
        if wheel.exists():
            faults += [f"{wheel.name} {fault}." for fault in faults_of_wheel(wheel, version)]
        if archive.exists():
            with tarfile.open(archive) as source:
                if f"{stem}-{version}/LICENSE" not in source.getnames():
                    faults.append(f"{archive.name} has no licence.")
        faults += [f"{path.name} is missing." for path in (wheel, archive) if not path.exists()]
    print("\n".join(faults) or f"{len(stems)} wheels and source archives are as they should be.")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
