"""What enable() does here, fit for a bug report; or, with ``check``, what a ds_config does."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import UnmanagedGasError, __version__, enable
from .compat import SUPPORTED
from .explain import explain


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def report() -> int:
    """Print what enable() does here. Returns 0 if it succeeds on this DeepSpeed, else 1."""
    print(f"ds_unmanaged_gas  {__version__}  (supports deepspeed {SUPPORTED})")
    print(f"python            {platform.python_version()} on {platform.platform()}")
    for distribution in ("torch", "deepspeed", "wrapt"):
        print(f"{distribution:<16}  {_version_of(distribution)}")
    try:
        status = enable()
    except UnmanagedGasError as error:
        print(f"enable()          {type(error).__name__}: {error}")
        return 1
    print(f"enable()          ok, DeepSpeed {status.deepspeed_version}, {status.era}")
    for patch in status.patches:
        print(f"  {patch.target}\n    {patch.why}")
    return 0


def check(path: Path) -> int:
    """Print what the ds_config in a JSON file asks for. Returns 0 if it is accepted, else 1."""
    try:
        params = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        print(f"{path}: can't be read as JSON: {error}")
        return 1
    if not isinstance(params, dict):
        print(f"{path}: not a JSON object")
        return 1
    accepted, lines = explain(params)
    print("\n".join(lines))
    return 0 if accepted else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns its exit code."""
    parser = argparse.ArgumentParser("python -m ds_unmanaged_gas", description=__doc__)
    commands = parser.add_subparsers(dest="command", title="commands")
    checking = commands.add_parser("check", help="explain a ds_config, without starting a job")
    checking.add_argument("ds_config", type=Path, help="a JSON file")
    parsed = parser.parse_args(arguments)
    return check(parsed.ds_config) if parsed.command == "check" else report()


if __name__ == "__main__":
    sys.exit(main())
