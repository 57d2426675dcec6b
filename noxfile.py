"""Sessions: demo, tests, lint, docs, build, release, and tests on other versions.

The distributions are read from packages/*. Their wheels are built once in a run of nox.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import nox
from packaging.requirements import Requirement

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
CORE, REFERENCE, FLAGGEMS = "vllm-fl-core", "vllm-fl-reference", "vllm-fl-flaggems"
BACKENDS = [name for name in PACKAGES if name != CORE]

# vLLM version -> (torch version, Python version). The first is for every day.
VLLM = {
    "0.28.0": ("2.13.0", "3.11"),
    "0.26.0": ("2.11.0", "3.12"),
    "0.33.0": ("2.14.0", "3.11"),
}
EVERYDAY = next(iter(VLLM))
EVERYDAY_PYTHON = VLLM[EVERYDAY][1]

FLAG_GEMS = "5.0.2"
# Oldest, what torch 2.13 pins, newest. The everyday environment has the newest, from vLLM.
TRITON = ("3.6.0", "3.7.1", "3.9.0")

PYTHONS = ("3.10", "3.11", "3.12", "3.13")  # core runs on all of them

nox.needs_version = ">=2025.5.1"
nox.options.sessions = ["lint", "tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"


_built: dict[str, Path] = {}


def build_wheels(session: nox.Session) -> dict[str, Path]:
    """Build every source archive, and from it the wheel, into dist/; distribution -> wheel."""
    if not _built:
        shutil.rmtree(DIST, ignore_errors=True)
        session.install("build", "hatchling")
        for name in PACKAGES:
            session.run(
                "python", "-m", "build", "--no-isolation", "--outdir", str(DIST),
                str(ROOT / "packages" / name), silent=True,
            )  # fmt: skip
            _built[name] = next(DIST.glob(f"{name.replace('-', '_')}-*.whl"))
    return _built


def install_wheels(session: nox.Session, *names: str) -> None:
    """Install the wheels of exactly these distributions of the project, freshly built."""
    wheels = build_wheels(session)
    session.run("python", "-m", "pip", "uninstall", "-q", "-y", *PACKAGES, silent=True)
    session.install(*(str(wheels[name]) for name in names))


def use_vllm(session: nox.Session, version: str) -> None:
    """Put vLLM, as a machine without an accelerator needs it, on the session's path.

    vLLM and torch are several gigabytes, so they are installed once, into an environment that the
    sessions share; what a session itself installs lies in its own.
    """
    base = ROOT / ".nox" / f"vllm-{version}"
    python = str(base / "bin" / "python")
    if not (base / "complete").exists():

        def pip_install(*arguments: str) -> None:
            session.run(python, "-m", "pip", "install", "-q", *arguments, external=True)

        session.run("python", "-m", "venv", "--clear", str(base))
        pip_install("--upgrade", "pip")
        pip_install(f"torch=={VLLM[version][0]}", "packaging")
        pip_install("--no-deps", f"vllm=={version}")
        script = str(ROOT / "tools" / "vllm_requirements.py")
        listed = session.run(python, script, external=True, silent=True)
        requirements = base / "requirements.txt"
        requirements.write_text(str(listed))
        pip_install("-r", str(requirements))
        (base / "complete").touch()
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    shared = str(session.run(python, "-c", where, external=True, silent=True)).strip()
    own = str(session.run("python", "-c", where, silent=True)).strip()
    Path(own, "vllm.pth").write_text(shared + "\n")


def install_flag_gems(session: nox.Session) -> None:
    """Install flag_gems; of what it requires it pins versions that vLLM cannot use."""
    session.install("--no-deps", f"flag-gems=={FLAG_GEMS}")
    session.install("sqlalchemy>=2.0.48", "pyyaml", "packaging")


def run_pytest(session: nox.Session, *paths: str) -> None:
    """Run pytest on the installed wheels; as a script it leaves the source tree off the path.

    Files of tests run side by side, each on one thread: threads of OpenMP that wait for each other
    on a busy machine make small operators a hundred times slower.
    """
    session.run(
        "pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile",
        *paths, *session.posargs,
        env={
            "PYTHONPATH": "", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )  # fmt: skip


@nox.session(python=EVERYDAY_PYTHON)
def demo(session: nox.Session) -> None:
    """Generate text with vLLM and the tiny model, through the dispatched operators."""
    use_vllm(session, EVERYDAY)
    install_wheels(session, CORE, REFERENCE)
    session.run("python", "examples/offline_inference.py", *session.posargs)


@nox.session(python=EVERYDAY_PYTHON)
@nox.parametrize("backend", [nox.param(name, id=name, tags=[name]) for name in BACKENDS])
def tests(session: nox.Session, backend: str) -> None:
    """Test core, one backend's wheel, vLLM running through them, and the documentation."""
    use_vllm(session, EVERYDAY)
    session.install("--group=test")
    install_wheels(session, *dict.fromkeys((CORE, REFERENCE, backend)))
    paths = [f"packages/{backend}/tests"]
    if backend == FLAGGEMS:
        install_flag_gems(session)
        paths.append("tests/test_triton_attention.py")
    if backend == REFERENCE:
        session.install("--group=docs")
        paths = [f"packages/{CORE}/tests", *paths, "tests"]
    run_pytest(session, *paths)


@nox.session(tags=["vllm"])
@nox.parametrize("python,version", [nox.param(p, v, id=v) for v, (_, p) in VLLM.items()])
def vllm(session: nox.Session, version: str) -> None:
    """Run the parity tests on another version of vLLM."""
    use_vllm(session, version)
    session.install("--group=test")
    install_wheels(session, CORE, REFERENCE)
    run_pytest(session, "packages/vllm-fl-reference/tests", "tests")


@nox.session(python=EVERYDAY_PYTHON)
@nox.parametrize("gems", [nox.param(True, id="flag_gems"), nox.param(False, id="alone")])
@nox.parametrize("triton", [nox.param(version, id=version) for version in TRITON])
def flaggems(session: nox.Session, triton: str, gems: bool) -> None:
    """Test the Triton kernels with another Triton, beside flag_gems and alone."""
    use_vllm(session, EVERYDAY)
    session.install("--group=test", f"triton=={triton}")
    install_wheels(session, CORE, REFERENCE, FLAGGEMS)
    if gems:
        install_flag_gems(session)
    tests = f"packages/{FLAGGEMS}/tests"
    run_pytest(session, tests, f"--ignore={tests}/test_vllm.py")


@nox.session(python=PYTHONS)
def core(session: nox.Session) -> None:
    """Test core and its command line, without torch and vLLM, on each version of Python."""
    session.install("--group=test")
    install_wheels(session, CORE, REFERENCE)
    run_pytest(session, f"packages/{CORE}/tests", "tests/test_third_party.py")


@nox.session(python=PYTHONS[0])
def minimums(session: nox.Session) -> None:
    """Test core with the oldest of everything that it may be installed with."""
    project = nox.project.load_toml(ROOT / "packages" / CORE / "pyproject.toml")["project"]
    extras = project["optional-dependencies"].values()
    session.install("--group=test")
    install_wheels(session, CORE, REFERENCE)
    session.install(*map(oldest, [*project["dependencies"], *(r for e in extras for r in e)]))
    run_pytest(session, f"packages/{CORE}/tests", "tests/test_third_party.py")


def oldest(requirement: str) -> str:
    """Return a requirement of exactly the lower bound of another."""
    wanted = Requirement(requirement)
    (bound,) = (clause.version for clause in wanted.specifier if clause.operator == ">=")
    return f"{wanted.name}=={bound}"


@nox.session(python=EVERYDAY_PYTHON)
def lint(session: nox.Session) -> None:
    """Check style, types and generated files."""
    session.install("--group=lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    for name in PACKAGES:
        session.run("mypy", f"packages/{name}/src")
    session.install("--no-deps", "packages/vllm-fl-core")
    session.run("python", "tools/generate_docs.py", "--check")
    check_new_projects(session)


def check_new_projects(session: nox.Session) -> None:
    """Check style and types of what ``vllm-fl new-backend`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        for number, options in enumerate(([], ["--with-attention", "--with-platform"])):
            out = f"{folder}/{number}"
            session.run("vllm-fl", "new-backend", "acme", *options, "--out", out, silent=True)
            session.run("ruff", "check", out)
            session.run("ruff", "format", "--check", out)
            session.run("mypy", "--config-file", "pyproject.toml", f"{out}/src")


@nox.session(python=EVERYDAY_PYTHON)
def build(session: nox.Session) -> None:
    """Build every wheel into dist/."""
    for wheel in build_wheels(session).values():
        session.log("built %s", wheel.relative_to(ROOT))


@nox.session(python=EVERYDAY_PYTHON)
def release(session: nox.Session) -> None:
    """Build what would be published, check it, and then test those very wheels."""
    build_wheels(session)
    session.install("twine", "packaging")
    session.run("python", "tools/check_wheels.py", str(DIST))
    session.run("twine", "check", "--strict", *map(str, sorted(DIST.iterdir())))
    for name in ("tests", "core", "minimums", "vllm"):
        session.notify(name)


@nox.session(python=EVERYDAY_PYTHON)
def docs(session: nox.Session) -> None:
    """Build the documentation into site/."""
    session.install("--group=docs")
    session.run(
        "mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"}
    )  # fmt: skip
