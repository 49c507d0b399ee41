"""Accelerate: its ``sync_gradients`` decides when an unmanaged engine steps.

``accelerator.backward()`` calls backward() and step() of an engine in one go. From 1.8 on it sets
the boundary of the engine beforehand, which an unmanaged engine refuses; before, it leaves that to
the counter of DeepSpeed and calls step() after every backward.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any

from ds_unmanaged_gas.config import BLOCK
from ds_unmanaged_gas.errors import UnsupportedConfigError, UnsupportedLibraryError
from ds_unmanaged_gas.patching import PatchSpec
from ds_unmanaged_gas.window import attached


def _wrap_backward(wrapped: Any, wrapper: Any, args: Any, kwargs: Any) -> Any:
    if attached(wrapper.engine) is None:
        return wrapped(*args, **kwargs)
    return _backward(wrapper.engine, *args, **kwargs)


def _backward(engine: Any, loss: Any, sync_gradients: bool | None = None, **further: Any) -> None:
    """Accumulate, and step if Accelerate synchronizes gradients after this micro-batch: at the end
    of a window, and with the last batch of a data loader.

    Raises UnsupportedConfigError, before anything is accumulated, if the window would be divided
    by something else than in the same loop without DeepSpeed.
    """
    state = _gradient_state()
    _require_one_divisor(engine, state.num_steps, further.get("scale_wrt_gas"))
    if sync_gradients is None:  # up to 1.7
        sync_gradients = state.sync_gradients
    engine.backward(loss, **further)
    if sync_gradients:
        engine.step()


def _gradient_state() -> Any:
    # Its state is shared by all of its instances.
    return sys.modules["accelerate.state"].GradientState()


def _require_one_divisor(engine: Any, num_steps: int, scale_wrt_gas: bool | None) -> None:
    scale = attached(engine).options.gradient_scale
    gas = engine.gradient_accumulation_steps()
    if scale_wrt_gas is False:
        # transformers.Trainer, among others, divides the loss itself.
        if scale == "num_backwards":
            raise UnsupportedConfigError(
                f'ds_config["{BLOCK}"]["gradient_scale"] = "num_backwards" would divide once more '
                "what the caller of accelerator.backward(loss, scale_wrt_gas=False) has divided "
                "already, as transformers.Trainer does; remove gradient_scale"
            )
    elif scale == "gas" and num_steps != gas:
        raise UnsupportedConfigError(
            f"Accelerate has gradient_accumulation_steps = {num_steps}, by which it would divide "
            f'each loss, but ds_config["gradient_accumulation_steps"] = {gas}; write "auto" there'
            f', or choose another divisor: "{BLOCK}": {{"gradient_scale": "num_backwards"}}'
        )


def _wrap_no_sync(wrapped: Any, _accelerator: Any, args: Any, kwargs: Any) -> Any:
    model = args[0] if args else kwargs.get("model")
    is_unmanaged = hasattr(model, "__dict__") and attached(model) is not None
    if is_unmanaged and model.zero_optimization_partition_gradients():
        return contextlib.nullcontext()
    return wrapped(*args, **kwargs)


def patches(module: ModuleType) -> tuple[PatchSpec, ...]:
    """The changes to this Accelerate release, given its ``accelerate.accelerator``.

    Raises UnsupportedLibraryError if it lacks a seam.
    """
    # No import statement: another thread may be importing the library, and wait for our lock.
    wrappers = sys.modules.get("accelerate.utils.deepspeed")
    return (
        PatchSpec(
            _owner(wrappers, "DeepSpeedEngineWrapper", "backward"),
            "backward",
            "Accelerate sets the boundary before every backward, or steps after every one; an "
            "unmanaged engine steps when gradients are to be synchronized",
            _wrap_backward,
        ),
        PatchSpec(
            _owner(module, "Accelerator", "no_sync"),
            "no_sync",
            "accumulate() of older releases uses engine.no_sync() on every stage, which stages 2 "
            "and 3 can't do and don't need",
            _wrap_no_sync,
        ),
    )


def _owner(module: ModuleType | None, name: str, method: str) -> type:
    """The class of this name, or UnsupportedLibraryError if it hasn't got the method."""
    owner = getattr(module, name, None)
    if isinstance(owner, type) and method in vars(owner):
        return owner
    version = getattr(sys.modules.get("accelerate"), "__version__", "of unknown version")
    raise UnsupportedLibraryError(
        f"accelerate {version} has no {name}.{method}, one of the ways in which it drives a "
        'DeepSpeed engine; with "managed_gradient_accumulation": false it could step at the wrong '
        "time. Nothing was patched. Install accelerate 0.34 to 1.15, or don't call "
        "ds_unmanaged_gas.enable() in a process that uses accelerate"
    )
