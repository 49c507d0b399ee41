"""Development tasks. ``nox -l`` lists them; the README says which two a newcomer needs.

All sessions that need torch share one environment, and every DeepSpeed release is unpacked into a
folder of its own beside it: torch is what takes the time and the space. Both live in .nox.

TORCH_VERSION selects another torch (default 2.13.0).
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_external_run = True

TORCH = os.environ.get("TORCH_VERSION", "2.13.0")
CACHE = Path(__file__).parent.resolve() / ".nox" / "shared"

# The newest release, and the last one of every older era of ds_unmanaged_gas/compat.py.
NEWEST = "0.19.8"
OLDER = ["0.19.7", "0.19.5", "0.19.4", "0.19.3", "0.18.4", "0.18.2", "0.17.4", "0.16.4", "0.15.4"]

# Those whose paths on GPUs differ: they run the tests on the accelerator double too.
ON_DOUBLE = [NEWEST, "0.19.3", "0.18.4", "0.16.4"]

# Every release in the supported range.
_MINORS = {"0.15": 5, "0.16": 10, "0.17": 7, "0.18": 10, "0.19": 9}
EVERY = [f"{minor}.{patch}" for minor, count in _MINORS.items() for patch in range(count)]

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


def torch_python(session: nox.Session, *further: str) -> str:
    """The interpreter of the shared environment, which is made on first use; of another one for
    further dependency groups, those that exist."""
    name = "-".join(["torch", TORCH, *further])
    folder = CACHE / f"{name}-python{sys.version_info.major}.{sys.version_info.minor}"
    python = str(folder / "bin" / "python")
    groups = nox.project.load_toml("pyproject.toml")["dependency-groups"]
    wanted = sorted({*DEEPSPEED_NEEDS, "wrapt>=1.17,<3", *groups["test"], *groups["lint"]})
    wanted += [*groups["demo"], f"torch=={TORCH}"]
    wanted += [requirement for group in further for requirement in groups.get(group, [])]
    marker = folder / "installed.txt"
    if not marker.exists() or marker.read_text() != "\n".join(wanted):
        session.run(sys.executable, "-m", "venv", "--clear", str(folder), external=True)
        session.run(python, "-m", "pip", "install", "--quiet", *wanted, external=True)
        marker.write_text("\n".join(wanted))
    return python


def package_folder(session: nox.Session, python: str, package: str, release: str) -> str:
    """The folder that holds this release of a package alone, which is unpacked on first use."""
    folder = CACHE / f"{package}-{release}"
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        requirement = f"{package}=={release}"
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
@nox.parametrize("deepspeed", [nox.param(release, id=release) for release in [NEWEST, *OLDER]])
def tests(session: nox.Session, deepspeed: str) -> None:
    """Run the tests on a DeepSpeed release: nox -s "tests(0.19.8)" for one, tests for all.

    All tests on the newest; on the last release of each older era those that are neither thorough
    nor build an op. Fails too if no test on the accelerator double reached a line that only an
    accelerator does. Arguments after -- go to pytest and replace that choice.
    """
    python = torch_python(session)
    env = environment(package_folder(session, python, "deepspeed", deepspeed), deepspeed)
    check_release(session, python, deepspeed, env)
    choice = [] if deepspeed == NEWEST else ["-m", "not thorough and not builds_op"]
    arguments = session.posargs or choice
    if not session.posargs and deepspeed not in ON_DOUBLE:
        arguments = [*arguments, "--ignore=tests/double"]
    lines = Path(session.create_tmp()) / "lines"
    shutil.rmtree(lines, ignore_errors=True)
    if not session.posargs and deepspeed == NEWEST:
        lines.mkdir()
        env["DOUBLE_COVERAGE"] = str(lines.resolve())
    # The two ranks of one test wait for each other half of the time: run two tests at once.
    session.run(python, "-m", "pytest", "-n2", *arguments, env=env, external=True)
    if lines.exists():
        session.run(python, "tests/accelerator_lines.py", str(lines), env=env, external=True)


# The last release of Accelerate that leaves the boundary to DeepSpeed's counter.
OLD_ACCELERATE = "1.7.0"


@nox.session(venv_backend="none")
def integrations(session: nox.Session) -> None:
    """Run the tests with other libraries (Accelerate, transformers, peft) on the newest DeepSpeed.

    In an environment of its own, since DeepSpeed imports some of them where they are installed.
    Arguments after -- go to pytest.
    """
    python = torch_python(session, "integrations", "tinker")
    env = environment(package_folder(session, python, "deepspeed", NEWEST), NEWEST)
    check_release(session, python, NEWEST, env)
    libraries = "import accelerate, peft, transformers; "
    libraries += (
        "print(*(f'{m.__name__} {m.__version__}' for m in (accelerate, peft, transformers)))"
    )
    session.run(python, "-c", libraries, env=env, external=True)
    arguments = session.posargs or ["tests/integrations"]
    session.run(python, "-m", "pytest", *arguments, env=env, external=True)
    if not session.posargs:
        old = package_folder(session, python, "accelerate", OLD_ACCELERATE)
        env["PYTHONPATH"] = os.pathsep.join([old, env["PYTHONPATH"]])
        tests = "tests/integrations/test_accelerate.py"
        session.run(python, "-m", "pytest", tests, env=env, external=True)


@nox.session(venv_backend="none")
def sweep(session: nox.Session) -> None:
    """Run all tests on every release, for hours, and write the README's table of the outcome.

    Arguments after -- are releases to run; the table keeps the others. Tests that compile an op run
    on the newest only: compiling takes longer than all other tests.
    """
    python = torch_python(session)
    results = []
    for release in session.posargs or EVERY:
        env = environment(package_folder(session, python, "deepspeed", release), release)
        check_release(session, python, release, env)
        choice = [] if release == NEWEST else ["-m", "not builds_op"]
        results.append(str(CACHE / "sweep" / f"{release}.xml"))
        arguments = ["-q", "--tb=short", f"--junit-xml={results[-1]}", *choice]
        # 1: some tests failed, which the table says.
        session.run(
            python, "-m", "pytest", *arguments, env=env, external=True, success_codes=[0, 1]
        )
    versions = f"torch {TORCH} (CPU), Python {platform.python_version()}, two gloo ranks"
    session.run(python, "tests/sweep.py", versions, *results, external=True)


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """200 random windows with faults in them, per stage and offload mode, on every era.

    Arguments after -- are releases. SOAK_WINDOWS and SOAK_SEED choose other windows.
    """
    python = torch_python(session)
    for release in session.posargs or [NEWEST, *OLDER]:
        env = environment(package_folder(session, python, "deepspeed", release), release)
        check_release(session, python, release, env)
        env["SOAK_WINDOWS"] = os.environ.get("SOAK_WINDOWS", "200")
        arguments = ["-q", "-s", "tests/distributed/test_soak.py"]
        session.run(python, "-m", "pytest", *arguments, env=env, external=True)


# Against managed mode, and the native mode or boundaries set by hand.
BENCHED = [NEWEST, "0.19.3", "0.18.4"]


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Compare the costs of windows with those of stock modes, for hours: README, bench.json.

    Continues what tests/bench/bench.json has; remove from it what is to be measured again.
    Arguments after -- are releases; --quick does a small part on the newest, and only prints.
    """
    python = torch_python(session)
    file = Path("tests/bench/bench.json")
    releases, options = session.posargs or BENCHED, []
    if "--quick" in session.posargs:
        file = Path(session.create_tmp()) / "quick.json"
        file.unlink(missing_ok=True)
        releases, options = [NEWEST], ["--quick"]
    for release in releases:
        env = environment(package_folder(session, python, "deepspeed", release), release)
        check_release(session, python, release, env)
        arguments = ["-W", "ignore", "tests/bench/run.py", str(file), *options]
        session.run(python, *arguments, env=env, external=True)
    session.run(python, "tests/bench/report.py", str(file), external=True)


@nox.session(venv_backend="none")
def gpu_counts(session: nox.Session) -> None:
    """Compare what a window asks of a GPU with managed mode, on the accelerator double.

    Arguments after -- are releases; with --only PART those rows whose name has it.
    """
    python = torch_python(session)
    releases = [each for each in session.posargs if each in EVERY] or ON_DOUBLE
    options = [each for each in session.posargs if each not in EVERY]
    for release in releases:
        env = environment(package_folder(session, python, "deepspeed", release), release)
        env["PYTHONPATH"] += f"{os.pathsep}tests"
        check_release(session, python, release, env)
        arguments = ["-W", "ignore", "tests/bench/gpu_counts.py", *options]
        session.run(python, *arguments, env=env, external=True)


@nox.session(venv_backend="none")
def fingerprints(session: nox.Session) -> None:
    """Record what is wrapped on every release, and the source of it: fingerprints.json, README."""
    python = torch_python(session)
    records = []
    for release in EVERY:
        env = environment(package_folder(session, python, "deepspeed", release), release)
        env |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"}
        records.append(f"{session.create_tmp()}/{release}.json")
        arguments = ["tests/compat/seams.py", "record", records[-1]]
        session.run(python, *arguments, env=env, external=True, silent=True)
    env = {"PYTHONPATH": str(Path(__file__).parent.resolve())}
    session.run(python, "tests/compat/seams.py", "merge", *records, env=env, external=True)


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
    env = environment(package_folder(session, python, "deepspeed", NEWEST), NEWEST)
    session.run(python, "examples/variable_windows.py", *session.posargs, env=env, external=True)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel and use it from another folder, beside a stock DeepSpeed."""
    session.install("--quiet", f"torch=={TORCH}", "setuptools", "wheel")
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder / "dist", ignore_errors=True)
    session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", f"{folder}/dist", ".")
    (built,) = (folder / "dist").glob("*.whl")
    session.install("--quiet", f"deepspeed=={NEWEST}", str(built))
    shutil.copy("tests/smoke.py", folder / "smoke.py")
    with session.chdir(folder):
        session.run("python", "-m", "ds_unmanaged_gas")
        session.run("python", "smoke.py")
