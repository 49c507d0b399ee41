"""Wrappers for DeepSpeedEngine: who is unmanaged. What that means is in unmanaged.py."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import engine as stock_engine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import logger
from deepspeed.utils.timer import ThroughputTimer
from torch.utils._pytree import tree_leaves

from . import config, gradients, inspection, stage1_2, stage3
from .compat import FLAG_METHOD, can_choose_reduction_dtype, era_of, undecorated
from .errors import BoundaryError, WindowOpenError
from .patching import PatchSpec, always, wrap_object
from .unmanaged import UnmanagedEngine
from .window import WindowState, attach, attached, live_engines

ERA = era_of(stock_engine)


def _wrap_init(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    call = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    ds_config = call.get("config_class")
    if ds_config is None or not config.wants_unmanaged(ds_config):
        return wrapped(*args, **kwargs)
    config.reject_unsupported(ds_config, is_pipeline=isinstance(call["model"], PipelineModule))
    state = UnmanagedEngine(config.options_of(ds_config))
    stage = int(ds_config.zero_optimization_stage)
    if (
        state.options.reduction == "step"
        and stage > 1
        and can_choose_reduction_dtype(deepspeed.__version__, stage)
    ):
        config.reduce_in_fp32(ds_config)
    specs = patches()
    attach(engine, state)
    wrap_object(engine, specs)
    with state.stock():
        result = wrapped(*args, **kwargs)
    state.attach(engine)
    wrap_object(engine.optimizer, specs)
    if config.sums_in_16_bits(ds_config) and engine.global_rank == 0:
        logger.warning(config.SUMS_IN_16_BITS)
    return result


def _wrap_backward(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    state: UnmanagedEngine | None = attached(engine)
    if state is None:
        return wrapped(*args, **kwargs)
    # Bound by name: 0.15 has two more arguments between the loss and the others.
    call = _signature_of_backward().bind(engine, *args, **kwargs).arguments
    del call["self"]
    return state.backward(wrapped, engine, **call)


@functools.cache
def _signature_of_backward() -> inspect.Signature:
    return inspect.signature(undecorated(DeepSpeedEngine.backward))


def _wrap_step(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    state: UnmanagedEngine | None = attached(engine)
    if state is None:
        return wrapped(*args, **kwargs)
    return state.step(wrapped, engine, args, kwargs)


def _wrap_take_model_step(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    state: UnmanagedEngine | None = attached(engine)
    if state is None:
        return wrapped(*args, **kwargs)
    return state.take_model_step(wrapped, engine, args, kwargs)


def _wrap_get_global_grad_norm(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    state: UnmanagedEngine = attached(engine)
    state.report_norm(engine)
    return wrapped(*args, **kwargs)


def _wrap_clip_grad_norm(wrapped: Any, _module: Any, args: Any, kwargs: Any) -> Any:
    norm = wrapped(*args, **kwargs)
    for engine in live_engines:
        state: UnmanagedEngine = attached(engine)
        if state.window.is_boundary:  # it is this engine's step() that clips
            state.clip_norm = norm
    return norm


def _wrap_zero_grad(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    state: UnmanagedEngine | None = attached(engine)
    if state is not None and not state.window.is_boundary:  # stock step() calls it too
        state.discard(engine)
    return wrapped(*args, **kwargs)


def _wrap_destroy(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    live_engines.discard(engine)
    return wrapped(*args, **kwargs)


def _wrap_is_boundary(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    state: UnmanagedEngine = attached(engine)
    return state.window.is_boundary


def _wrap_is_managed(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    # See [Note: stock code runs managed]
    state: UnmanagedEngine = attached(engine)
    return state.is_in_stock


def managed_gradient_accumulation(engine: Any) -> bool:
    """Whether DeepSpeed's own counter decides when a window ends. Added to releases without it."""
    return attached(engine) is None


def _wrap_backward_prologue(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    state: UnmanagedEngine | None = attached(engine)
    if state is not None and not state.is_in_backward:
        state.begin_torch_style(engine)
    return result


def _wrap_backward_epilogue(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    state: UnmanagedEngine | None = attached(engine)
    if state is not None and not state.is_in_backward:
        state.end_torch_style(engine)
    return result


def _wrap_scale_output_grad(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    state: UnmanagedEngine | None = attached(engine)
    if state is not None and (state.is_in_backward or state.options.gradient_scale != "gas"):
        return args[0]  # engine.backward() has divided the loss, if it is to be divided
    return wrapped(*args, **kwargs)


def _wrap_forward(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    state: UnmanagedEngine | None = attached(engine)
    if state is not None and engine.zero_optimization_partition_weights():
        state.announce(engine, "forward()")  # it gathers parameters
    if state is not None:
        state.time_forward(engine)
    outputs = wrapped(*args, **kwargs)
    if state is not None and not gradients.HAS_TORCH_STYLE and torch.is_grad_enabled():
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(state.refuse_torch_style)  # type: ignore[no-untyped-call]
    return outputs


def _refusal(name: str, reason: str) -> Any:
    def wrapper(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
        if attached(engine) is None:
            return wrapped(*args, **kwargs)
        raise BoundaryError(f'{name}() is not supported with "{config.FLAG}": false: {reason}')

    return wrapper


def _wrap_no_sync(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    if attached(engine) is not None and engine.zero_optimization_partition_gradients():
        raise BoundaryError(
            f"no_sync() is not supported with ZeRO stage {engine.zero_optimization_stage()}, which "
            "has to reduce in every backward; leave it out: nothing is updated before step()"
        )
    return wrapped(*args, **kwargs)


def _wrap_offload_states(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    state: UnmanagedEngine | None = attached(engine)
    if state is not None and state.window.state is WindowState.OPEN:
        raise WindowOpenError(
            f"offload_states() would drop the gradients of {state.window.num_backwards} backwards "
            "that no step() has applied; call step() first"
        )
    return wrapped(*args, **kwargs)


def _wrap_save_checkpoint(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    state: UnmanagedEngine | None = attached(engine)
    if state is not None:
        state.warn_of_unsaved_window()
    return wrapped(*args, **kwargs)


def _wrap_load_checkpoint(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    state: UnmanagedEngine | None = attached(engine)
    if state is not None:
        # Its gradients are of weights that are about to be replaced.
        state.discard(engine)
    return wrapped(*args, **kwargs)


def _wrap_avg_samples_per_sec(wrapped: Any, timer: Any, args: Any, kwargs: Any) -> Any:
    state: UnmanagedEngine | None = attached(timer)
    if state is None or timer.total_elapsed_time == 0:
        return wrapped(*args, **kwargs)
    return state.timed_samples / timer.total_elapsed_time


def patches() -> tuple[PatchSpec, ...]:
    """Every change to this DeepSpeed release, in the order in which they are made."""

    def on_engine(name: str, why: str, wrapper: Any) -> PatchSpec:
        return PatchSpec(DeepSpeedEngine, name, why, wrapper)

    specs = [
        on_engine("__init__", "reads the flag and refuses what can't be honoured", _wrap_init),
        on_engine(
            "backward",
            "accumulates only; divides by GAS once, at the loss, on every release and stage",
            _wrap_backward,
        ),
        on_engine("step", "finalizes the window and applies exactly one update", _wrap_step),
        PatchSpec(
            DeepSpeedEngine,
            "is_gradient_accumulation_boundary",
            "True exactly while step() runs",
            _wrap_is_boundary,
            on_objects=always,
        ),
        on_engine(
            "set_gradient_accumulation_boundary",
            "refused: the caller owns the boundary",
            _refusal(
                "set_gradient_accumulation_boundary",
                "step() is the boundary; call step() when the window is complete. (DeepSpeed's "
                "UlyssesSPFwdLossBwdWithLogits calls it: use UlyssesSPDataLoaderAdapter instead, "
                "which took its place)",
            ),
        ),
        on_engine(
            "zero_grad",
            "drops the open window; stock clears param.grad, where stages 2 and 3 keep nothing",
            _wrap_zero_grad,
        ),
        on_engine(
            "forward",
            "ends the time of the last micro-batch; compares ranks at stage 3, if asked for; up to "
            "0.18.2 refuses a later loss.backward(), which these releases can't finish",
            _wrap_forward,
        ),
        on_engine(
            "save_checkpoint",
            "warns that the gradients of an open window are not saved",
            _wrap_save_checkpoint,
        ),
        on_engine(
            "load_checkpoint",
            "drops the open window, whose gradients stock would apply to the restored weights",
            _wrap_load_checkpoint,
        ),
        on_engine("destroy", "a destroyed engine no longer holds up disable()", _wrap_destroy),
        on_engine(
            "_take_model_step",
            "counts the samples of this window, and takes a gradient norm at stage 0",
            _wrap_take_model_step,
        ),
        PatchSpec(
            DeepSpeedEngine,
            "get_global_grad_norm",
            "reports a gradient norm at stage 0, where stock has none",
            _wrap_get_global_grad_norm,
            on_objects=always,
        ),
        PatchSpec(
            stock_engine,
            "clip_grad_norm_",
            "stock forgets the norm by which it clips at stage 0",
            _wrap_clip_grad_norm,
        ),
        PatchSpec(
            ThroughputTimer,
            "avg_samples_per_sec",
            "stock assumes that every step has the configured number of samples",
            _wrap_avg_samples_per_sec,
        ),
    ]
    if gradients.HAS_TORCH_STYLE:
        specs += [
            on_engine(
                "_backward_prologue",
                "notices that a loss.backward() began",
                _wrap_backward_prologue,
            ),
            on_engine(
                "_backward_epilogue",
                "counts a loss.backward() that ended",
                _wrap_backward_epilogue,
            ),
            on_engine(
                "_backward_prologue_per_tensor",
                "stock divides by GAS here too, against scale_wrt_gas=False if the loss is the "
                "module's own output",
                _wrap_scale_output_grad,
            ),
        ]
    # Methods that only callers call: where a release lacks one there is nothing to refuse.
    refused = (
        (
            "no_sync",
            "refused on stages 2 and 3 by an error that survives python -O",
            _wrap_no_sync,
        ),
        (
            "offload_states",
            "refused in an open window, whose gradients it would drop",
            _wrap_offload_states,
        ),
        (
            "coalesce_grad_reduction",
            "refused: it would end the window on leaving its block",
            _refusal(
                "coalesce_grad_reduction",
                "it makes leaving its block the boundary; call step() instead",
            ),
        ),
    )
    specs += [on_engine(*each) for each in refused if hasattr(DeepSpeedEngine, each[0])]
    if hasattr(DeepSpeedEngine, FLAG_METHOD):  # from 0.19.4, the native mode
        why = "keeps the native mode out of the way"
        specs.append(
            PatchSpec(DeepSpeedEngine, FLAG_METHOD, why, _wrap_is_managed, on_objects=always)
        )
    else:
        specs.append(
            PatchSpec(
                DeepSpeedEngine,
                FLAG_METHOD,
                "code written for the native mode asks for it",
                method=managed_gradient_accumulation,
            )
        )
    parts = (gradients, stage1_2, stage3, inspection)
    return (*specs, *(spec for part in parts for spec in part.patches()))


def methods(specs: Iterable[PatchSpec]) -> Iterator[tuple[type | ModuleType, str]]:
    """The stock methods whose source matters: those that are wrapped, and those whose effect the
    wrappers count on."""
    yield from ((spec.owner, spec.name) for spec in specs if spec.wrapper is not None)
    counted_on = (
        (DeepSpeedEngine, ("allreduce_gradients", "buffered_allreduce_fallback")),
        *gradients.COUNTED_ON,
        *stage1_2.COUNTED_ON,
        *stage3.COUNTED_ON,
    )
    for owner, names in counted_on:
        # Which ones a release has differs.
        yield from ((owner, name) for name in names if name in vars(owner))


def is_in_backward() -> bool:
    """Whether the backward that runs in this thread, if any, is one of an unmanaged engine."""
    task = torch._C._current_graph_task_id()  # -1: none
    states: list[UnmanagedEngine] = [attached(engine) for engine in live_engines]
    return task >= 0 and any(s.is_in_backward or s._torch_style_task == task for s in states)


def require_no_open_window() -> None:
    """Raise WindowOpenError if a live engine holds gradients that no step() has applied."""
    for engine in live_engines:
        state: UnmanagedEngine = attached(engine)
        if state.window.state is WindowState.OPEN:
            raise WindowOpenError(
                f"an engine holds an open window of {state.window.num_backwards} backwards; call "
                "its step() before disable()"
            )


# Without the patches an unmanaged engine would silently run as a managed one.
_RETIRED_METHODS = ("backward", "step", "forward")


def retire_live_engines() -> None:
    """Make every live unmanaged engine raise on use, until enable() is called again."""
    for engine in live_engines:
        state: UnmanagedEngine = attached(engine)
        state.is_retired = True
        # On the instance: the class has its stock methods back.
        refuse = _refuse_retired(state)
        vars(engine).update(dict.fromkeys(_RETIRED_METHODS, refuse))


def _refuse_retired(state: UnmanagedEngine) -> Callable[..., None]:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        state.require_enabled()

    return refuse


def revive_live_engines() -> None:
    """Undo retire_live_engines()."""
    for engine in live_engines:
        attached(engine).is_retired = False
        for name in _RETIRED_METHODS:
            vars(engine).pop(name, None)
