"""Development tasks. ``nox -l`` lists them; the README says which two a newcomer needs.

All sessions that need torch share one environment, and every DeepSpeed release is unpacked into a
folder of its own beside it: torch is what takes the time and the space. Both live in .nox.

TORCH_VERSION selects another torch (default 2.13.0).
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_external_run = True

TORCH = os.environ.get("TORCH_VERSION", "2.13.0")
CACHE = Path(__file__).parent.resolve() / ".nox" / "shared"

# The newest release, the last one before the native mode, and the oldest that is supported.
RELEASES = ["0.19.8", "0.19.3", "0.18.4"]

# What DeepSpeed itself requires beside torch; it is installed without its dependencies.
DEEPSPEED_NEEDS = [
    "einops",
    "hjson",
    "msgpack",
    "ninja",
    "numpy",
    "packaging",
    "psutil",
    "py-cpuinfo",
    "pydantic>=2",
    "tqdm",
]


def torch_python(session: nox.Session) -> str:
    """The interpreter of the shared environment, which is made on first use."""
    folder = CACHE / f"torch-{TORCH}-python{sys.version_info.major}.{sys.version_info.minor}"
    python = str(folder / "bin" / "python")
    groups = nox.project.load_toml("pyproject.toml")["dependency-groups"]
    wanted = sorted({*DEEPSPEED_NEEDS, "wrapt>=1.17,<3", *groups["test"], *groups["lint"]})
    wanted += [*groups["demo"], f"torch=={TORCH}"]
    marker = folder / "installed.txt"
    if not marker.exists() or marker.read_text() != "\n".join(wanted):
        session.run(sys.executable, "-m", "venv", "--clear", str(folder), external=True)
        session.run(python, "-m", "pip", "install", "--quiet", *wanted, external=True)
        marker.write_text("\n".join(wanted))
    return python


def deepspeed_folder(session: nox.Session, python: str, release: str) -> str:
    """The folder that holds this DeepSpeed release, which is unpacked on first use."""
    folder = CACHE / f"deepspeed-{release}"
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        requirement = f"deepspeed=={release}"
        arguments = ["--quiet", "--no-deps", "--target", str(unfinished), requirement]
        session.run(python, "-m", "pip", "install", *arguments, external=True)
        unfinished.rename(folder)
    return str(folder)


def environment(folder: str, release: str) -> dict[str, str]:
    return {
        # The checkout for the package itself; the wheel session tests what is installed.
        "PYTHONPATH": os.pathsep.join([folder, str(Path(__file__).parent.resolve())]),
        "TORCH_EXTENSIONS_DIR": str(CACHE / f"extensions-{release}"),
        "OMP_NUM_THREADS": "1",
    }


def check_release(session: nox.Session, python: str, release: str, env: dict[str, str]) -> None:
    code = f"import deepspeed, torch; v = deepspeed.__version__; assert v == {release!r}, v; "
    code += "print('deepspeed', v, 'torch', torch.__version__)"
    session.run(python, "-c", code, env=env, external=True)


@nox.session(venv_backend="none")
@nox.parametrize("deepspeed", [nox.param(release, id=release) for release in RELEASES])
def tests(session: nox.Session, deepspeed: str) -> None:
    """Run the tests on a DeepSpeed release: nox -s "tests(0.19.8)" for one, tests for all."""
    python = torch_python(session)
    env = environment(deepspeed_folder(session, python, deepspeed), deepspeed)
    check_release(session, python, deepspeed, env)
    session.run(python, "-m", "pytest", *session.posargs, env=env, external=True)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Ruff, its formatter, and mypy in strict mode on the package."""
    python = torch_python(session)
    for arguments in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        session.run(python, "-m", *arguments, external=True)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train a small model with windows of varying length and compare with plain PyTorch."""
    python = torch_python(session)
    release = RELEASES[0]
    env = environment(deepspeed_folder(session, python, release), release)
    session.run(python, "examples/variable_windows.py", *session.posargs, env=env, external=True)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel and use it from another folder, beside a stock DeepSpeed."""
    session.install("--quiet", f"torch=={TORCH}", "setuptools", "wheel")
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder / "dist", ignore_errors=True)
    session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", f"{folder}/dist", ".")
    (built,) = (folder / "dist").glob("*.whl")
    session.install("--quiet", f"deepspeed=={RELEASES[0]}", str(built))
    shutil.copy("tests/smoke.py", folder / "smoke.py")
    with session.chdir(folder):
        session.run("python", "-m", "ds_unmanaged_gas")
        session.run("python", "smoke.py")
