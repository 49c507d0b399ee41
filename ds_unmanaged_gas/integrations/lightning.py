"""Lightning's Trainer calls step() after every batch, and leaves windows to DeepSpeed's counter."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ds_unmanaged_gas.errors import UnsupportedConfigError
from ds_unmanaged_gas.patching import PatchSpec
from ds_unmanaged_gas.window import attached


def _wrap_optimizer_step(wrapped: Any, _precision: Any, args: Any, kwargs: Any) -> Any:
    model = kwargs["model"] if "model" in kwargs else args[1]
    is_unmanaged = attached(model.trainer.model) is not None
    num_batches = model.trainer.accumulate_grad_batches
    if is_unmanaged and model.automatic_optimization and num_batches != 1:
        raise UnsupportedConfigError(
            f"accumulate_grad_batches = {num_batches}: Lightning's Trainer calls step() after each "
            'batch, and with "managed_gradient_accumulation": false each step() is an update; set '
            "accumulate_grad_batches to 1 and self.automatic_optimization = False, and call "
            "self.manual_backward() and optimizer.step() when you want them, or remove the flag"
        )
    return wrapped(*args, **kwargs)


def patches(module: ModuleType) -> tuple[PatchSpec, ...]:
    """The changes to this Lightning release, given its module of DeepSpeed's precision plugin."""
    why = "Lightning's Trainer steps after every batch; refused with accumulate_grad_batches"
    return (PatchSpec(module.DeepSpeedPrecision, "optimizer_step", why, _wrap_optimizer_step),)
