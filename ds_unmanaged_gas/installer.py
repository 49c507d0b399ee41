"""enable, disable and status: the checks, the lock and the one ledger."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from . import compat
from .errors import UnsupportedDeepSpeedError
from .patching import AppliedPatch, apply_all, undo_all
from .window import attached

_lock = threading.RLock()
_ledger: tuple[AppliedPatch, ...] = ()
_release: compat.Release | None = None


@dataclass(frozen=True, slots=True)
class Patch:
    """One patched attribute, and why it is patched."""

    target: str
    why: str


@dataclass(frozen=True, slots=True)
class Status:
    """What the plugin has done to this process. ``deepspeed_version`` and ``era`` are None and
    ``patches`` is empty while it is not enabled."""

    enabled: bool
    deepspeed_version: str | None
    era: str | None
    patches: tuple[Patch, ...]


def enable() -> Status:
    """Patch DeepSpeed, all seams or none; only engines built from now on can be unmanaged.

    Imports DeepSpeed. May be called again, and from any thread. Issues no collective, but every
    rank has to call it.

    Raises UnsupportedDeepSpeedError if DeepSpeed can't be imported, is outside the supported range
    or lacks a seam, and PatchConflictError if one is taken; DeepSpeed is then as it was.
    """
    global _ledger, _release
    with _lock:
        if _ledger:
            return status()
        try:
            import deepspeed
        except ImportError as error:
            raise UnsupportedDeepSpeedError(
                "DeepSpeed can't be imported; ds_unmanaged_gas patches an installed deepspeed "
                f"{compat.SUPPORTED}"
            ) from error
        compat.check_version(deepspeed.__version__)
        try:
            # Imports names of DeepSpeed: a missing one is a missing seam.
            from . import engine
        except ImportError as error:
            raise UnsupportedDeepSpeedError(
                f"DeepSpeed {deepspeed.__version__} lacks something that ds_unmanaged_gas depends "
                f"on: {error}. Nothing was patched. Install deepspeed {compat.SUPPORTED}"
            ) from error
        release = compat.describe(deepspeed.__version__, deepspeed.DeepSpeedEngine)
        _ledger = apply_all(engine.patches())
        _release = release
        engine.revive_live_engines()
        return status()


def disable() -> None:
    """Put back the very objects that enable() found. Does nothing if not enabled.

    Engines built unmanaged refuse to run from then on, since stock code would run them managed.

    Raises WindowOpenError while one of them holds gradients that no step() has applied, and
    PatchConflictError if another library has wrapped a patched method since. Nothing is then
    undone.
    """
    global _ledger, _release
    with _lock:
        if not _ledger:
            return
        from . import engine

        engine.require_no_open_window()
        undo_all(_ledger)
        _ledger, _release = (), None
        engine.retire_live_engines()


def status() -> Status:
    """What is patched, and why."""
    with _lock:
        release = _release
        return Status(
            enabled=bool(_ledger),
            deepspeed_version=release.version if release else None,
            era=release.era if release else None,
            patches=tuple(Patch(applied.spec.target, applied.spec.why) for applied in _ledger),
        )


def is_unmanaged(engine: Any) -> bool:
    """True if this DeepSpeedEngine leaves the boundary to its caller."""
    return attached(engine) is not None
