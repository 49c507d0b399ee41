"""What is patched when it has been imported, and never imported from here: libraries that call
backward() and step() in their users' stead, and parts of DeepSpeed that few use."""

from __future__ import annotations

import sys
from types import ModuleType

from ds_unmanaged_gas.patching import PatchSpec

from . import accelerate, lightning, tiled_compute

# The module whose import makes the library usable with DeepSpeed, and what is patched then.
_PATCHES = {
    "accelerate.accelerator": accelerate.patches,
    "deepspeed.runtime.sequence_parallel.ulysses_sp": tiled_compute.patches,
    # One library under two names.
    "lightning.pytorch.plugins.precision.deepspeed": lightning.patches,
    "pytorch_lightning.plugins.precision.deepspeed": lightning.patches,
}

MODULES = tuple(_PATCHES)


def patches_for(module: ModuleType) -> tuple[PatchSpec, ...]:
    """The changes to the library of this module, one of ``MODULES``. Raises
    UnsupportedLibraryError if it lacks a seam."""
    return _PATCHES[module.__name__](module)


def patches() -> tuple[PatchSpec, ...]:
    """The changes to every library that is imported already. Raises UnsupportedLibraryError."""
    loaded = [sys.modules[name] for name in MODULES if name in sys.modules]
    return tuple(spec for module in loaded for spec in patches_for(module))
