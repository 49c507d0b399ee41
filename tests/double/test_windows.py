"""Windows on an accelerator whose work is late: exact updates, and no two accesses to the same
memory that nothing orders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from harness.model import LEARNING_RATE, Heads, tensors, weights_of
from harness.pool import RankPool
from harness.releases import DEEPSPEED, HAS_TORCH_STYLE, between
from harness.training import (
    broken_backward,
    forward,
    full_weights,
    make_config,
    make_engine,
)

import ds_unmanaged_gas

BOTH = {"a": 1, "b": 2}
ALSO = {"a": 3, "b": 4}
ONLY_A = {"a": 5}
ONLY_B = {"b": 6}

# What a caller does, one after the other on one engine. A number is a step() with that divisor;
# after one below zero nobody looks at the outcome, which would be a wait.
SCRIPT: list[Any] = [
    *[BOTH, ALSO, ONLY_B, 1],
    *[ONLY_B, 1],  # one backward, and what the last window left of head a
    *[ONLY_B, BOTH, ALSO, 4],  # head a is late
    *[ALSO, -1, -1, 1],  # an empty window, at once after a step()
    *[BOTH, -2, "norm", 1],  # the norm of one
    *[BOTH, ALSO, -1, ONLY_B, -2, "discard", BOTH, "discard", -1, ALSO, 1],
    *[BOTH, "norm", "norm", ALSO, "norm", 2],
    *[ONLY_A, BOTH, "discard", ONLY_B, 1],
    *[BOTH, "broken", ALSO, ONLY_A, 4],  # an exception, and zero_grad()
    *["discard", BOTH, 1, 1],
    *[BOTH, "gradients", ALSO, "gradients", 2, "gradients", ONLY_A, 1],
    *[("torch", BOTH), ("torch", ONLY_B), ALSO, 2],
    *[("stream", ONLY_B), BOTH, ("stream", ALSO), 2],
]
OVERFLOW: list[Any] = [*[BOTH, "overflow", 1], *[ONLY_B, 2], *["overflow", 1], 1]

_CLIP = 1.0

IGNORES_STREAMS = between("0.15.0", "0.18.7")
"""Stage 3 reduces behind the default stream, on whichever the caller's backward runs."""


def full_gradients(engine: Any) -> Any:
    """What the window has summed so far, without the loss scale."""
    scale = engine._ds_unmanaged_gas.gradients.loss_scale()
    named = engine.module.named_parameters()
    return {n: (deepspeed.utils.safe_get_full_grad(p) / scale).tolist() for n, p in named}


def backward_otherwise(engine: Any, how: str, micro_batch: Any) -> None:
    """By loss.backward(), where DeepSpeed has it for unscaled losses, or on the caller's own
    stream, which is joined with the default one."""
    from harness import double

    is_zero = isinstance(engine.optimizer, ZeROOptimizer)
    if how == "torch" and HAS_TORCH_STYLE and is_zero and not engine.fp16_enabled():
        forward(engine, micro_batch).backward()
        return
    is_own = how == "stream" and not (engine.zero_optimization_stage() == 3 and IGNORES_STREAMS)
    stream = double.Stream(name="stream of the caller") if is_own else double.DEFAULT
    stream.wait_stream(double.DEFAULT)
    with double.on_stream(stream):
        ds_unmanaged_gas.accumulation(engine).backward(forward(engine, micro_batch))
    double.DEFAULT.wait_stream(stream)


def drop_half_a_window(engine: Any, window: Any) -> None:
    with broken_backward(engine), pytest.raises(ZeroDivisionError):
        window.backward(forward(engine, ALSO))
    engine.zero_grad()


def run(config: dict[str, Any], script: list[Any], fused: bool = False) -> dict[str, Any]:
    from harness import double

    options: dict[str, Any] = {}
    if fused:
        options["optimizer"] = lambda p: double.FusedSGD(p, lr=LEARNING_RATE)
    engine = make_engine(config, **options)
    window = ds_unmanaged_gas.accumulation(engine)
    seen: list[Any] = []
    by_name = {
        "norm": lambda: seen.append(window.grad_norm()),
        "gradients": lambda: seen.append(full_gradients(engine)),
        "discard": engine.zero_grad,
        "broken": lambda: drop_half_a_window(engine, window),
        "overflow": lambda: window.backward(forward(engine, BOTH) * float("inf")),
    }
    double.finish()
    double.RECORD.reset()
    for action in script:
        if isinstance(action, dict):
            window.backward(forward(engine, action))
        elif isinstance(action, tuple):
            backward_otherwise(engine, *action)
        elif isinstance(action, str):
            by_name[action]()
        else:
            window.step(denominator=abs(action))
            if action > 0:
                seen += [float(engine.get_global_grad_norm()), full_weights(engine)]
    # Clipping rounds.
    window.backward(forward(engine, BOTH))
    window.step(max_grad_norm=_CLIP)
    clipped = full_weights(engine)
    double.finish()
    races = double.RECORD.as_dict()["races"]
    engine.destroy()
    return {"seen": seen, "clipped": clipped, "races": races}


class Reference:
    """The same in plain PyTorch."""

    def __init__(self) -> None:
        self.model = Heads()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self._overflows = False
        self.drop()

    def drop(self) -> None:
        self._overflows = False
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def backward(self, micro_batch: Any) -> None:
        for rank in range(2):
            (self.model(tensors(micro_batch, rank, torch.float32)) / 2).backward()

    def overflow(self) -> None:
        self._overflows = True

    def gradients(self) -> Any:
        named = self.model.named_parameters()
        return {n: p.grad.tolist() for n, p in named if p.grad is not None}

    def norm(self) -> float | None:
        """None of an overflow: releases differ in what they report."""
        grads = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return None if self._overflows else float(torch.linalg.vector_norm(torch.cat(grads)))

    def step(self, divisor: float = 1.0) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= divisor
        if not self._overflows:
            self._optimizer.step()
        self.drop()


def reference(script: list[Any]) -> dict[str, Any]:
    plain = Reference()
    seen: list[Any] = []
    by_name = {
        "norm": lambda: seen.append(plain.norm()),
        "gradients": lambda: seen.append(plain.gradients()),
        "discard": plain.drop,
        "broken": plain.drop,
        "overflow": plain.overflow,
    }
    for action in script:
        if isinstance(action, (dict, tuple)):
            plain.backward(action if isinstance(action, dict) else action[1])
        elif isinstance(action, str):
            by_name[action]()
        else:
            norm = plain.norm()
            plain.step(abs(action))
            if action > 0:
                seen += [None if norm is None else norm / action, weights_of(plain.model)]
    plain.backward(BOTH)
    torch.nn.utils.clip_grad_norm_(plain.model.parameters(), _CLIP)
    plain.step()
    return {"seen": seen, "clipped": weights_of(plain.model)}


def _cells() -> Iterator[Any]:
    """Those that differ in dtypes only, or wait more, run on the newest release only."""
    for dtype in ("fp32", "bf16", "bf16-fp32", "fp16"):
        yield pytest.param(0, None, dtype, False, "backward")
        for stage, overlaps in itertools.product((1, 2, 3), (False, True)):
            offloads = (None, "optimizer", "param") if stage == 3 else (None, "optimizer")
            reductions = ("backward",) if stage == 1 else ("backward", "step")
            for offload, reduction in itertools.product(offloads, reductions):
                is_first = dtype in ("fp32", "fp16") and offload != "param"
                # Stage 1 copies to the host last with the one, stages 2 and 3 with the other.
                is_first = is_first and overlaps == (stage > 1)
                marks = [] if is_first else [pytest.mark.thorough]
                yield pytest.param(stage, offload, dtype, overlaps, reduction, marks=marks)


def cell_config(
    stage: int, offload: str | None, dtype: str, overlaps: bool, reduction: str, **options: Any
) -> dict[str, Any]:
    """Pinned host memory, and buckets that a parameter may fill."""
    zero: dict[str, Any] = {"reduce_bucket_size": 20}
    if stage > 0:
        zero["overlap_comm"] = overlaps
    for part in {"optimizer": ["optimizer"], "param": ["optimizer", "param"]}.get(
        offload or "", []
    ):
        zero[f"offload_{part}"] = {"device": "cpu", "pin_memory": True}
    dtype, *sums = dtype.split("-")
    config = make_config(
        stage=stage,
        dtype=dtype,
        accum_dtype=sums[0] if sums else None,
        zero=zero,
        zero_force_ds_cpu_optimizer=False,
        **options,
    )
    if reduction == "step":
        config["unmanaged_gradient_accumulation"] = {"reduction": "step"}
    return config


def _close(weights: dict[str, Any]) -> Any:
    # DeepSpeed adds 1e-6 to the norm that it clips by, torch too, but to a norm summed otherwise.
    return {
        name: pytest.approx(torch.tensor(w).flatten().tolist(), rel=1e-5, abs=1e-6)
        for name, w in weights.items()
    }


def run_managed(config: dict[str, Any]) -> list[str]:
    from harness import double

    engine = make_engine(config)
    double.RECORD.reset()
    for _ in range(3):
        for micro_batch in (BOTH, ALSO):
            engine.backward(forward(engine, micro_batch))
            engine.step()
    double.finish()
    races = list(double.RECORD.races)
    engine.destroy()
    return races


def races_of_stock(gpu_ranks: RankPool, config: dict[str, Any]) -> set[str]:
    """What races in managed mode too. Up to 0.18.4 stage 2 frees a bucket that its own stream still
    reads, if communication overlaps."""
    ours = ("managed_gradient_accumulation", "unmanaged_gradient_accumulation")
    managed = {key: value for key, value in config.items() if key not in ours}
    managed["gradient_accumulation_steps"] = 2
    return {
        race for races in gpu_ranks.run(run_managed, plugin=False, config=managed) for race in races
    }


@pytest.mark.parametrize(("stage", "offload", "dtype", "overlaps", "reduction"), list(_cells()))
def test_late_work_changes_no_update(
    gpu_ranks: RankPool, stage: int, offload: str | None, dtype: str, overlaps: bool, reduction: str
) -> None:
    # Stock's timer waits for the device twice per micro-batch, and hides what nothing else orders.
    timers = {"throughput": {"enabled": False}}
    config = cell_config(stage, offload, dtype, overlaps, reduction, timers=timers)
    if stage == 0 and dtype == "fp16":
        # With a static scale FP16_Optimizer fails up to 0.16.4: it has no timers.
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 4}
    script = SCRIPT + (OVERFLOW if dtype == "fp16" else [])
    fused = stage == 0 and dtype != "fp32"
    expected = reference(script)
    reports = gpu_ranks.run(run, config=config, script=script, fused=fused)
    of_stock: set[str] = set()
    if any(report["races"] for report in reports):
        of_stock = races_of_stock(gpu_ranks, config)
    for report in reports:
        assert set(report["races"]) <= of_stock
        for ours, theirs in zip(report["seen"], expected["seen"], strict=True):
            if isinstance(theirs, float):
                # The order in which squares are added up differs.
                assert ours == pytest.approx(theirs, rel=1e-6)
            elif theirs is not None:  # None: the norm of an overflow, of which releases differ
                assert ours == theirs
        clipped = {n: torch.tensor(w).flatten().tolist() for n, w in report["clipped"].items()}
        assert clipped == _close(expected["clipped"])


def run_managed_on_own_stream(config: dict[str, Any]) -> list[str]:
    from harness import double

    engine = make_engine(config)
    double.RECORD.reset()
    stream = double.Stream(name="stream of the caller")
    stream.wait_stream(double.DEFAULT)
    with double.on_stream(stream):
        engine.backward(forward(engine, BOTH))
    double.finish()
    races = list(double.RECORD.races)
    engine.destroy()
    return races


@pytest.mark.skipif(not IGNORES_STREAMS, reason=f"DeepSpeed {DEEPSPEED} waits for that stream")
def test_stock_races_with_a_stream_of_the_caller_at_stage_3(gpu_ranks: RankPool) -> None:
    config = cell_config(3, None, "fp32", True, "backward", unmanaged=False)
    for races in gpu_ranks.run(run_managed_on_own_stream, plugin=False, config=config):
        assert any(race.startswith("stream of the caller writes") for race in races)
