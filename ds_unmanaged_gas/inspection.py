"""DeepSpeed's accessors of gradients, between the last backward() and step()."""

from __future__ import annotations

import importlib
from typing import Any

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from .errors import BoundaryError
from .patching import PatchSpec
from .window import attached, live_engines


def _holder_of(param: Any) -> Any:
    """The state of the unmanaged engine that has this parameter; None, and stock code does, if
    there is none or its step() is running."""
    for engine in live_engines:
        state = attached(engine)
        if state.has(param):
            return None if state.window.is_boundary else state
    return None


def _wrap_get_full_grad(wrapped: Any, _module: Any, args: Any, kwargs: Any) -> Any:
    (param,) = args or kwargs.values()
    state = _holder_of(param)
    if state is None or not param.requires_grad:
        return wrapped(param)
    return state.full_grad(wrapped, param)


def _wrap_set_full_grad(wrapped: Any, _module: Any, args: Any, kwargs: Any) -> Any:
    param = args[0] if args else kwargs["param"]
    # Where the window's sum is param.grad, setting that on every rank is all it takes.
    if param.grad is None:
        _refuse_to_set(_holder_of(param))
    return wrapped(*args, **kwargs)


def _refuse_to_set(state: Any) -> None:
    if state is not None:
        raise BoundaryError(
            "setting gradients is not supported where a window's sums are not in param.grad: they "
            "would not reach all of them; scale the losses instead, or compute the gradient and "
            "train on the sum of its products with the parameters"
        )


def _wrap_stage3_getter(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    state = _holder_in(optimizer)
    if state is not None:
        state.preview()
    return wrapped(*args, **kwargs)


def _wrap_stage3_setter(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    _refuse_to_set(_holder_in(optimizer))
    return wrapped(*args, **kwargs)


def _holder_in(optimizer: Any) -> Any:
    gradients = attached(optimizer)
    if gradients is None:
        return None
    state = attached(gradients.engine)
    return None if state.window.is_boundary else state


def patches() -> tuple[PatchSpec, ...]:
    """The changes to DeepSpeed's accessors."""
    specs: list[PatchSpec] = []
    # The same functions. (By name: a class shadows the first module.)
    for name in ("deepspeed.utils.tensor_fragment", "deepspeed.utils"):
        module = importlib.import_module(name)
        specs.append(
            PatchSpec(
                module,
                "safe_get_full_grad",
                "stock gives this rank's unreduced sum at stages 0 and 1, and raises on some ranks "
                "only, or gives an earlier window's gradient, at stage 2",
                _wrap_get_full_grad,
            )
        )
        if hasattr(module, "safe_set_full_grad"):  # from 0.15.3
            specs.append(
                PatchSpec(
                    module,
                    "safe_set_full_grad",
                    "refused where it would change a part of the window's sums only",
                    _wrap_set_full_grad,
                )
            )
    getters = ("get_fp32_grad_for_param", "get_local_fp32_grad_for_param")
    setters = (
        "set_fp32_grad_for_param",
        "set_local_grad_for_param",
        "update_fp32_grad_for_param_vectorized",
    )
    specs += [
        PatchSpec(
            DeepSpeedZeroOptimizer_Stage3,
            name,
            "stock gives an earlier window's gradient of a parameter that took no part in this "
            "one, and of every parameter with offload",
            _wrap_stage3_getter,
        )
        for name in getters
    ]
    specs += [
        PatchSpec(
            DeepSpeedZeroOptimizer_Stage3,
            name,
            "refused: it would not reach all that is summed",
            _wrap_stage3_setter,
        )
        for name in setters
        if hasattr(DeepSpeedZeroOptimizer_Stage3, name)
    ]
    return tuple(specs)
