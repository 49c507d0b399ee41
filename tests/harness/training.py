"""Builds engines and drives them; runs inside the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import safe_get_full_fp32_param
from packaging.version import Version

from .model import LEARNING_RATE, Heads, Weights, Window, tensors
from .releases import DEEPSPEED, between

STAGES = [0, 1, 2, 3]

MODES = [
    *(pytest.param(stage, False, id=str(stage)) for stage in STAGES),
    *(pytest.param(stage, True, id=f"{stage}-offload") for stage in (1, 2, 3)),
]
"""Stage, and whether the optimizer is on the CPU: the arguments of mode_config()."""

# Up to 0.15.2 ZeRO-3 aborts if a backward leaves a prefetched parameter unused, as windows with
# another set of heads do. See the control.
_NO_PREFETCH = {"stage3_prefetch_bucket_size": 0} if Version("0.15.3") > DEEPSPEED else {}

PARTITIONED_MODES = [mode for mode in MODES if mode.values[0] in (2, 3)]
"""Those of MODES that reduce in every backward, unless told otherwise."""

REDUCED_AT_STEP: dict[str, Any] = {"unmanaged_gradient_accumulation": {"reduction": "step"}}
"""For a ds_config of stage 2 or 3."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_config(
    *,
    stage: int,
    dtype: str = "fp32",
    accum_dtype: str | None = None,
    gas: int = 1,
    unmanaged: bool = True,
    zero: dict[str, Any] | None = None,
    **top_level: Any,
) -> dict[str, Any]:
    """A ds_config for the exact tests. fp16 uses a static loss scale of 16."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        # Defaults to 1.0 from DeepSpeed 0.19.3, to off before.
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,  # None fails up to 0.15.1
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 1000,
            "stage3_param_persistence_threshold": 0,
            **_NO_PREFETCH,
            **(zero or {}),
        },
        **top_level,
    }
    if unmanaged:
        config["managed_gradient_accumulation"] = False
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 16}
    if accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": accum_dtype}
    return config


def offload_config(stage: int, *, param: bool = False, **options: Any) -> dict[str, Any]:
    """make_config() with the optimizer, and optionally the parameters, on the CPU."""
    zero = {"offload_optimizer": {"device": "cpu"}, **options.pop("zero", {})}
    if param:
        zero["offload_param"] = {"device": "cpu"}
    return make_config(stage=stage, zero=zero, zero_force_ds_cpu_optimizer=False, **options)


def mode_config(stage: int, offload: bool, **options: Any) -> dict[str, Any]:
    """make_config(), or with ``offload`` offload_config()."""
    return (offload_config if offload else make_config)(stage=stage, **options)


def make_engine(
    config: dict[str, Any], *, model: Any = None, optimizer: Any = None, **kwargs: Any
) -> Any:
    """deepspeed.initialize() with SGD on Heads, unless told otherwise."""
    model = model or Heads()
    make_optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=LEARNING_RATE))
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(parameters), config=config, **kwargs
    )
    _make_destructible(engine)
    return engine


def _make_destructible(engine: Any) -> None:
    """engine.destroy() of ZeRO-3 up to 0.16.x deletes a buffer that it made for contiguous
    gradients only."""
    buffer = "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer"
    if type(engine.optimizer) is DeepSpeedZeroOptimizer_Stage3 and not hasattr(
        engine.optimizer, buffer
    ):
        setattr(engine.optimizer, buffer, None)


def batch_for(engine: Any, micro_batch: Any) -> Any:
    dtype = next(engine.module.parameters()).dtype
    return tensors(micro_batch, deepspeed.comm.get_rank(), dtype, engine.device)


def forward(engine: Any, micro_batch: Any) -> Any:
    """The loss of a micro-batch; with no head at all, a zero loss that reaches every parameter."""
    if micro_batch:
        return engine(batch_for(engine, micro_batch))
    return engine(batch_for(engine, {"a": 0, "b": 0})) * 0.0


def run_window(engine: Any, window: Window, **backward: Any) -> None:
    for micro_batch in window:
        engine.backward(forward(engine, micro_batch), **backward)
    engine.step()


def run_windows(engine: Any, windows: Sequence[Window], **backward: Any) -> list[Weights]:
    """Run the windows, undivided unless told otherwise. Returns the weights after each."""
    history = []
    for window in windows:
        run_window(engine, window, **({"scale_wrt_gas": False} | backward))
        history.append(full_weights(engine))
    return history


@contextmanager
def broken_backward(engine: Any) -> Iterator[None]:
    """Make a backward() inside raise ZeroDivisionError when one head is done and the other is not,
    if head a takes part."""
    handle = engine.module.a.bias.register_hook(lambda _: 1 / 0)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def broken_update(engine: Any) -> Iterator[None]:
    """Make a step() inside raise ZeroDivisionError in the optimizer's update."""
    update = engine.basic_optimizer.step
    engine.basic_optimizer.step = lambda *_, **__: 1 / 0
    try:
        yield
    finally:
        engine.basic_optimizer.step = update


def full_weights(engine: Any) -> Weights:
    """The weights that the optimizer updates, in fp32. Collective on every stage but 0."""
    optimizer = engine.optimizer
    if isinstance(optimizer, FP16_Optimizer):
        weights = {}
        names = {p: n for n, p in engine.module.named_parameters()}
        for lps, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat):
            for lp, part in zip(lps, flat.split([p.numel() for p in lps])):
                weights[names[lp]] = part.view_as(lp).tolist()
        return weights
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        masters = {
            lp: hp
            for lps, hps in zip(optimizer.fp16_groups, optimizer.fp32_groups)
            for lp, hp in zip(lps, hps)
        }
        return {n: masters[p].tolist() for n, p in engine.module.named_parameters()}
    if engine.zero_optimization_stage() < 3 and not isinstance(optimizer, BF16_Optimizer):
        parameters = dict(engine.module.named_parameters())
        if all(p.dtype == torch.float32 for p in parameters.values()):
            return {name: p.tolist() for name, p in parameters.items()}
    weights = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            weights[name] = safe_get_full_fp32_param(parameter).tolist()
    return weights


def train(
    windows_by_rank: Sequence[Sequence[Window]],
    config: dict[str, Any],
    *,
    backward: dict[str, Any] | None = None,
) -> list[Weights]:
    """Train on this rank's windows. Returns the weights after each."""
    engine = make_engine(config)
    history = run_windows(engine, windows_by_rank[deepspeed.comm.get_rank()], **(backward or {}))
    engine.destroy()
    return history


def backward_undivided(engine: Any, loss: torch.Tensor, **options: Any) -> None:
    """A backward of a managed engine that does not divide by GAS: 0.18.3 does whatever it is told,
    and others if the loss is the module's own output."""
    gas = engine.gradient_accumulation_steps() if between("0.18.3", "0.18.3") else 1
    engine.backward(loss * float(gas), scale_wrt_gas=False, **options)


def train_managed(windows: Sequence[Window], config: dict[str, Any]) -> list[Weights]:
    """The stock loop: step() after every backward. All windows have GAS micro-batches."""
    engine = make_engine(config)
    history = []
    for window in windows:
        for micro_batch in window:
            backward_undivided(engine, forward(engine, micro_batch))
            engine.step()
        history.append(full_weights(engine))
    engine.destroy()
    return history
