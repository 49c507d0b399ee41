"""Ranks that are started once and reused: importing DeepSpeed costs seconds per process.

A test sends a module-level function and plain keyword arguments to every rank and gets back what
each rank returned; assertions are made in the parent, so that pytest can explain them. A task that
fails, hangs or kills its process costs its own pool only: the pool is killed, the test fails with
every rank's traceback or exit code, and the next task starts fresh ranks.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from . import worker
from .releases import between, skip_if_stock_rejects

TASK_TIMEOUT_S = 120
"""Far above the seconds that a task takes, so that only a hang reaches it."""

_AFTER_FAILURE_S = 3
"""How long the others may take to report once a rank has failed: they may wait for it for ever."""


class RanksFailed(Exception):
    """A task failed on at least one rank. The text has every rank's traceback or fate."""


class RankPool:
    def __init__(self, world_size: int, *, on_double: bool = False) -> None:
        self.world_size = world_size
        self.on_double = on_double
        """Whether the ranks use the accelerator of double/."""
        self.num_starts = 0
        self.cells: set[str] = set()
        """The stages and offload modes of the configs that were sent, until cleared."""
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder = ""

    def _start(self) -> None:
        # Every rank, and every one that replaces a failed one, is forked from a process that has
        # done the imports.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["harness.preload"])
        # In many releases of Python the fork server has another sys.path, and doesn't tell that it
        # could import nothing.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            forkserver.ensure_running()
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=worker.main,
                args=(theirs, rank, self.world_size, self._folder, self.on_double),
                daemon=True,
                name=f"rank{rank}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self.num_starts += 1

    def run(
        self,
        function: Callable[..., Any],
        *,
        plugin: bool = True,
        timeout: float = TASK_TIMEOUT_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(**kwargs)`` on every rank, with the plugin enabled or not. Returns the
        results by rank. Raises RanksFailed if a rank raises, dies or takes too long. Skips the test
        if stock DeepSpeed rejects the ``config``."""
        if "config" in kwargs:
            skip_if_stock_rejects(kwargs["config"])
            self.cells.add(cell_of(kwargs["config"]))
        if not self._processes:
            self._start()
        # A test module is no module that another process could import; the harness is.
        in_harness = function.__module__.startswith("harness.")
        where = function.__module__ if in_harness else inspect.getsourcefile(function)
        for pipe in self._pipes:
            pipe.send((where, function.__name__, kwargs, plugin))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size:
            waiting = {
                handle: rank
                for rank in range(self.world_size)
                if rank not in answers
                for handle in (self._pipes[rank], self._processes[rank].sentinel)
            }
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in sorted({waiting[handle] for handle in ready}):
                answers[rank] = self._read(rank)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
        failed = [rank for rank in range(self.world_size) if not answers.get(rank, (False,))[0]]
        if failed:
            report = "\n".join(
                f"--- rank {rank} ---\n"
                + str(answers.get(rank, (False, "no answer: still running, killed"))[1])
                for rank in failed
            )
            logs = "\n".join(self._log_tail(rank) for rank in failed)
            self.close()
            raise RanksFailed(f"ranks {failed} failed\n{report}\n{logs}")
        return [answers[rank][1] for rank in range(self.world_size)]

    def _read(self, rank: int) -> tuple[bool, Any]:
        try:
            if self._pipes[rank].poll():
                answer: tuple[bool, Any] = self._pipes[rank].recv()
                return answer
        except (EOFError, ConnectionResetError):
            pass
        self._processes[rank].join(timeout=5)
        return False, f"died with exit code {self._processes[rank].exitcode}"

    def _log_tail(self, rank: int) -> str:
        log = Path(self._folder, worker.log_name(rank))
        lines = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
        return "\n".join([f"--- last output of rank {rank} ---", *lines])

    def close(self) -> None:
        """Kill the ranks. The next run() starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


def cell_of(config: dict[str, Any]) -> str:
    """The stage and offload mode of a ds_config, in words."""
    zero = config["zero_optimization"]
    devices = {zero.get(f"offload_{what}", {}).get("device") for what in ("optimizer", "param")}
    offload = " + NVMe" if "nvme" in devices else " + offload" if "cpu" in devices else ""
    return f"stage {zero['stage']}{offload}"


def configure_environment() -> None:
    """Set what the ranks inherit, before the first of them imports torch."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Up to 0.15.4 DeepSpeed loads its own checkpoints in a way that torch 2.6 and later refuse.
    if not between("0.16.0"):
        os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    # Built ops of one DeepSpeed release don't load in another.
    import importlib.metadata

    release = importlib.metadata.version("deepspeed")
    os.environ.setdefault(
        "TORCH_EXTENSIONS_DIR",
        str(Path(tempfile.gettempdir()) / f"ds_unmanaged_gas-extensions-{release}"),
    )
