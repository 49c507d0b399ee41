"""``python -m ds_unmanaged_gas``: what enable() does here, in a form fit for a bug report."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from . import UnmanagedGasError, __version__, enable
from .compat import SUPPORTED


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def main() -> int:
    """Print the report. Returns 0 if enable() succeeds on the installed DeepSpeed, else 1."""
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


if __name__ == "__main__":
    sys.exit(main())
