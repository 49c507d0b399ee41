"""DeepSpeed's sequence-tiled modules: refuses what they would get wrong without an error.

They mark the parameters of a tiled module by ``ds_grad_is_ready``, False until its last tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from ds_unmanaged_gas.errors import WindowArgumentError
from ds_unmanaged_gas.patching import PatchSpec


def _is_ours() -> bool:
    """Whether the backward that runs is one of an unmanaged engine."""
    from ds_unmanaged_gas import engine

    return engine.is_in_backward()


def _wrap_tiled_backward(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    if _is_ours():
        ctx = args[0]
        _require_ready(ctx.compute_params)
    return result


def _require_ready(params: Iterable[Any]) -> None:
    unready = [param for param in params if not getattr(param, "ds_grad_is_ready", True)]
    for param in unready:
        param.ds_grad_is_ready = True  # or later backwards, tiled or not, would lose theirs too
    if unready:
        raise WindowArgumentError(
            "a sequence-tiled module has fewer tiles than it was told (torch.chunk() makes as few "
            "as hold the sequence), so it never marked its gradients complete, and ZeRO would have "
            "dropped them; choose a number of tiles (shards) that divides the sequence"
        )


def _wrap_fused_forward(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    ctx, *_, compute_params, _reduction = args
    result = wrapped(*args, **kwargs)
    ctx.compute_params = list(compute_params or ())
    return result


def _wrap_fused_backward(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    if _is_ours():
        ctx, grad = args
        _require_ready(ctx.compute_params)
        if grad != 1:
            raise WindowArgumentError(
                f"the gradient of a TiledFusedLogitsLoss is {float(grad)}, not 1: it works "
                "in forward(), before the loss is divided or scaled, and the gradients of its "
                "compute_params stay undivided; call backward(loss, scale_wrt_gas=False) with the "
                'loss as it is, divide at step() ("gradient_scale": "num_backwards" in '
                '"unmanaged_gradient_accumulation"), and use no fp16 loss scale'
            )
    return wrapped(*args, **kwargs)


def patches(module: ModuleType) -> tuple[PatchSpec, ...]:
    """The changes to this DeepSpeed release, given its ``ulysses_sp`` module."""
    incomplete = "a module that has fewer tiles than shards never hands its gradients to ZeRO"
    scaled = "divides and scales the gradients of its input only, not those of its compute_params"
    specs = [
        PatchSpec(getattr(module, name), "backward", incomplete, _wrap_tiled_backward)
        for name in ("SequenceTiledCompute", "TiledMLP")
        if hasattr(module, name)
    ]
    fused = getattr(module, "TiledFusedLogitsLoss", None)  # from 0.17.4
    if fused is not None:
        specs += [
            PatchSpec(fused, "forward", incomplete, _wrap_fused_forward),
            PatchSpec(fused, "backward", scaled, _wrap_fused_backward),
        ]
    return tuple(specs)
