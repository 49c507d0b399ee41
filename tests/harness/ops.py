"""DeepSpeed's C++ ops, compiled before a test needs them."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

BUILD_TIMEOUT_S = 1800
"""async_io takes two to four minutes on two cores, and longer beside other work."""

_LOAD = (
    "import sys, deepspeed.accelerator as a\n"
    "a.get_accelerator().create_op_builder(sys.argv[1]).load(verbose=False)\n"
)


@functools.cache
def build(builder: str) -> None:
    """Compile the op of this builder, `AsyncIOBuilder` for one, so that the ranks only load it: a
    rank that is killed while it compiles leaves a lock file, on which every later load waits."""
    command = [sys.executable, "-c", _LOAD, builder]
    # A session of its own, so that the compilers are killed with it.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=BUILD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
                lock.unlink()
            raise
    if process.returncode != 0:
        raise RuntimeError(f"{builder} can't be built:\n{output}")
