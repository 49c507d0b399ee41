"""enable, disable and status: the checks, the lock and the one ledger."""

from __future__ import annotations

import sys
import threading
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from . import compat, fingerprints, integrations
from .errors import UnsupportedDeepSpeedError
from .patching import AppliedPatch, apply_all, undo_all
from .window import attached

_lock = threading.RLock()
_ledger: tuple[AppliedPatch, ...] = ()
_era: compat.Era | None = None
_version: str | None = None
_has_import_hooks = False


@dataclass(frozen=True, slots=True)
class Patch:
    """One patched attribute, and why it is patched: of the class or module, or where stock code
    calls it very often, of the objects of unmanaged engines only."""

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


def enable(*, strict: bool = False) -> Status:
    """Patch DeepSpeed, all seams or none; only engines built from now on can be unmanaged.

    Imports DeepSpeed. May be called again, and from any thread. Issues no collective, but every
    rank has to call it. Patches Accelerate too, now or when it is imported.

    Warns if DeepSpeed is newer than what was tested, or if a method that the plugin wraps or counts
    on has a source that no tested release has; the warning names the methods. With ``strict`` the
    latter is an error.

    Raises UnsupportedDeepSpeedError if DeepSpeed can't be imported, is outside the supported range
    or lacks a seam, UnsupportedLibraryError if Accelerate lacks one, and PatchConflictError if one
    is taken; everything is then as it was.
    """
    global _ledger, _version, _era
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
        version = deepspeed.__version__
        compat.check_version(version)
        try:
            # Imports names of DeepSpeed: a missing one is a missing seam.
            from . import engine
        except ImportError as error:
            raise UnsupportedDeepSpeedError(
                f"DeepSpeed {version} lacks something that ds_unmanaged_gas depends on: {error}. "
                f"Nothing was patched. Install deepspeed {compat.SUPPORTED}"
            ) from error
        specs = engine.patches()
        _check_sources(version, fingerprints.unknown(engine.methods(specs)), strict=strict)
        _ledger = apply_all([*specs, *integrations.patches()])
        _version, _era = version, engine.ERA
        engine.revive_live_engines()
        _hook_imports()
        return status()


def _hook_imports() -> None:
    """Have the libraries of ``integrations`` patched when they are imported, if that is to come."""
    global _has_import_hooks
    if _has_import_hooks:
        return
    _has_import_hooks = True
    for name in integrations.MODULES:
        if name not in sys.modules:
            wrapt.register_post_import_hook(_patch_imported, name)


def _patch_imported(module: ModuleType) -> None:
    """Import hook, which can't be taken back: does nothing while the plugin is not enabled."""
    global _ledger
    with _lock:
        if _ledger:
            _ledger += apply_all(integrations.patches_for(module))


def _check_sources(version: str, changed: list[str], *, strict: bool) -> None:
    if not changed:
        return
    message = (
        f"DeepSpeed {version}: the source of {', '.join(changed)} is that of no release that "
        "ds_unmanaged_gas was tested with, so gradients may be wrong. Install deepspeed "
        f"{compat.SUPPORTED}, or compare a few steps of your training with plain PyTorch"
    )
    if strict:
        raise UnsupportedDeepSpeedError(f"{message}. Nothing was patched (strict=True)")
    warnings.warn(message, stacklevel=3)


def disable() -> None:
    """Put back the very objects that enable() found. Does nothing if not enabled.

    Engines built unmanaged refuse to run from then on, since stock code would run them managed.

    Raises WindowOpenError while one of them holds gradients that no step() has applied, and
    PatchConflictError if another library has wrapped a patched method since. Nothing is then
    undone.
    """
    global _ledger, _version, _era
    with _lock:
        if not _ledger:
            return
        from . import engine

        engine.require_no_open_window()
        undo_all(_ledger)
        _ledger, _version, _era = (), None, None
        engine.retire_live_engines()


def status() -> Status:
    """What is patched, and why."""
    with _lock:
        return Status(
            enabled=bool(_ledger),
            deepspeed_version=_version,
            era=str(_era) if _era else None,
            patches=tuple(Patch(applied.spec.target, applied.spec.why) for applied in _ledger),
        )


def is_unmanaged(engine: Any) -> bool:
    """True if this DeepSpeedEngine leaves the boundary to its caller."""
    return attached(engine) is not None
