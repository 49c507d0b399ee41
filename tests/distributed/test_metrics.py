"""Counters, timer, norm, clipping and schedules see what really happened in the window."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness.model import LEARNING_RATE, Heads, tensors
from harness.pool import RankPool
from harness.training import (
    STAGES,
    forward,
    full_weights,
    make_config,
    make_engine,
    run_window,
)
from torch.utils._python_dispatch import TorchDispatchMode

COUNTS = [2, 5, 3, 1, 1, 4]
WINDOWS = [[{"a": 10 * w + m, "b": 10 * w + m} for m in range(n)] for w, n in enumerate(COUNTS)]


def count(config: dict[str, Any]) -> list[tuple[int, int, int]]:
    engine = make_engine(config)
    report = []
    for window in WINDOWS:
        run_window(engine, window)
        report.append((engine.global_steps, engine.global_samples, engine.skipped_steps))
    engine.destroy()
    return report


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("gas", [1, 4])
def test_global_samples_follow_the_number_of_backwards(
    ranks: RankPool, stage: int, gas: int
) -> None:
    """Two samples per backward and rank, whatever the configured GAS."""
    expected = [(i + 1, 4 * sum(COUNTS[: i + 1]), 0) for i in range(len(COUNTS))]
    assert ranks.run(count, config=make_config(stage=stage, gas=gas)) == [expected, expected]


def time_windows(config: dict[str, Any]) -> dict[str, Any]:
    """Run windows under a clock that moves by one second per forward and per update only."""
    import deepspeed.utils.timer as timer_module

    class Clock:
        now = 1000.0

        def time(self) -> float:
            return self.now

    clock = Clock()
    engine = make_engine(config)
    engine.module.register_forward_hook(lambda *_: setattr(clock, "now", clock.now + 1))
    update = engine._take_model_step

    def slow_update(*args: Any, **kwargs: Any) -> Any:
        clock.now += 1
        return update(*args, **kwargs)

    engine._take_model_step = slow_update
    logged: list[str] = []
    engine.tput_timer.logging = logged.append
    engine.tput_timer.steps_per_output = 1
    original, timer_module.time = timer_module.time, clock
    try:
        for window in WINDOWS:
            run_window(engine, window)
            clock.now += 100  # the caller's own time between steps is not the engine's
    finally:
        timer_module.time = original
    report = {"average": engine.tput_timer.avg_samples_per_sec(), "logged": logged}
    engine.destroy()
    return report


@pytest.mark.thorough
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("gas", [1, 4])
def test_throughput_covers_the_whole_window(ranks: RankPool, stage: int, gas: int) -> None:
    report = ranks.run(time_windows, config=make_config(stage=stage, gas=gas))[0]
    timed = COUNTS[2:]  # the timer skips its first two steps
    seconds = [n + 1 for n in timed]  # one per forward, one for the update
    assert report["average"] == 4 * sum(timed) / sum(seconds)
    current = [
        float(line.split("CurrSamplesPerSec=")[1].split(",")[0]) for line in report["logged"]
    ]
    # Printed with an epsilon of 1e-6 seconds.
    assert current[-len(timed) :] == [
        pytest.approx(4 * n / s, rel=1e-5) for n, s in zip(timed, seconds)
    ]


def norms_and_weights(config: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(config)
    report: dict[str, Any] = {"norms": [], "weights": []}
    for window in WINDOWS:
        run_window(engine, window, scale_wrt_gas=False)
        report["norms"].append(float(engine.get_global_grad_norm()))
        report["weights"].append(full_weights(engine))
    engine.destroy()
    return report


def clipped_reference(clip: float) -> dict[str, Any]:
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    report: dict[str, Any] = {"norms": [], "weights": []}
    for window in WINDOWS:
        optimizer.zero_grad()
        for rank in range(2):
            for micro_batch in window:
                (model(tensors(micro_batch, rank, torch.float32)) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        optimizer.step()
        report["norms"].append(float(norm))
        report["weights"].append({n: p.detach().clone() for n, p in model.named_parameters()})
    return report


@pytest.mark.thorough
@pytest.mark.parametrize("clip", [0.0, 2.0])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("dtype", "accum_dtype"),
    [("fp32", None), ("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16")],
)
def test_norm_and_clipping(
    ranks: RankPool, stage: int, dtype: str, accum_dtype: str | None, clip: float
) -> None:
    config = make_config(stage=stage, dtype=dtype, accum_dtype=accum_dtype)
    config["gradient_clipping"] = clip
    expected = clipped_reference(clip)
    for report in ranks.run(norms_and_weights, config=config):
        # The order in which squares are summed differs by stage and from PyTorch's: a few fp32
        # roundings (2**-24 each). Stock divides by norm + 1e-6, another 1e-7 relative here.
        assert report["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        for ours, theirs in zip(report["weights"], expected["weights"]):
            for name, weight in theirs.items():
                ulps = 1e-5 if clip else 0.0
                torch.testing.assert_close(torch.tensor(ours[name]), weight, rtol=ulps, atol=ulps)


class Norms(TorchDispatchMode):
    """Counts the norms that are taken."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "norm" in str(func)
        return func(*args, **(kwargs or {}))


def norms_taken(config: dict[str, Any]) -> tuple[int, Any]:
    engine = make_engine(config)
    with Norms() as norms:
        run_window(engine, WINDOWS[0][:1])
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return norms.number, None if norm is None else float(norm)


def test_stage0_reports_the_norm_it_clips_by(ranks: RankPool) -> None:
    config = make_config(stage=0)
    (not_clipped, norm), _ = ranks.run(norms_taken, config=config)
    config["gradient_clipping"] = 2.0
    managed = config | {"managed_gradient_accumulation": True}
    for ours, stock in zip(
        ranks.run(norms_taken, config=config), ranks.run(norms_taken, config=managed)
    ):
        assert ours == (stock[0], norm)  # stock takes it too, and forgets it
        assert ours[0] > not_clipped > 0


def learning_rates(config: dict[str, Any]) -> list[float]:
    engine = make_engine(
        config,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
    )
    rates = []
    for window in WINDOWS[:4]:
        run_window(engine, window)
        rates.append(engine.get_lr()[0])
    engine.destroy()
    return rates


@pytest.mark.parametrize("stage", STAGES)
def test_lr_schedule_moves_once_per_step(ranks: RankPool, stage: int) -> None:
    expected = [LEARNING_RATE / (2 + i) for i in range(4)]
    assert ranks.run(learning_rates, config=make_config(stage=stage)) == [expected, expected]


def boundary_queries(config: dict[str, Any]) -> dict[str, Any]:
    """What is_gradient_accumulation_boundary() says around and inside the calls, and after a
    step() in which the optimizer raised."""
    engine = make_engine(config)
    said: dict[str, Any] = {"new": engine.is_gradient_accumulation_boundary()}
    engine.module.register_forward_hook(
        lambda *_: said.update(forward=engine.is_gradient_accumulation_boundary())
    )
    loss = forward(engine, {"a": 1, "b": 1})
    engine.backward(loss)
    said["after backward"] = engine.is_gradient_accumulation_boundary()
    basic = engine.basic_optimizer
    update = basic.step

    def failing_update(*args: Any, **kwargs: Any) -> None:
        said["in step"] = engine.is_gradient_accumulation_boundary()
        raise ArithmeticError("the optimizer failed")

    basic.step = failing_update
    try:
        engine.step()
    except ArithmeticError:
        said["raised"] = True
    basic.step = update
    said["after a failed step"] = engine.is_gradient_accumulation_boundary()
    mirrored = getattr(engine.optimizer, "is_gradient_accumulation_boundary", False)
    said["mirrored"] = mirrored() if callable(mirrored) else mirrored
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_boundary_is_step(ranks: RankPool, stage: int) -> None:
    for said in ranks.run(boundary_queries, config=make_config(stage=stage)):
        assert said.pop("in step") is True
        assert said.pop("raised") is True
        assert said == dict.fromkeys(
            ["new", "forward", "after backward", "after a failed step", "mirrored"], False
        )
