"""I5: an exception fails the window, and dropping it gives a clean one, in the same process."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from harness.model import Weights, reference, same_on_all_ranks
from harness.pool import RankPool
from harness.releases import skip_without_torch_style
from harness.training import (
    MODES,
    broken_backward,
    broken_update,
    forward,
    full_weights,
    make_config,
    make_engine,
    mode_config,
    run_window,
    run_windows,
)


class Raise(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("bad micro-batch")


GOOD = [{"a": 1, "b": 1}, {"a": 2, "b": 2}]
BAD = {"a": 3, "b": 3}
AFTER = [[{"a": 4, "b": 4}], [{"a": 5}, {"b": 6}, {"a": 7, "b": 7}], [{"b": 8}]]


def break_window(
    config: dict[str, Any], where: str, first: bool = False, style: str = "engine"
) -> dict[str, Any]:
    """A good window (unless ``first``), then one that an exception ends, what is refused after it,
    zero_grad(), and windows AFTER."""
    import ds_unmanaged_gas

    engine = make_engine(config)
    history: list[Weights] = []
    said: list[str] = []

    def attempt(action: Any) -> None:
        try:
            action()
            said.append("ok")
        except ArithmeticError:
            said.append("raised")
        except ds_unmanaged_gas.WindowFailedError as error:
            said.append(type(error.__cause__).__name__)

    backward = {
        "torch": torch.Tensor.backward,
        "engine": functools.partial(engine.backward, scale_wrt_gas=False),
    }[style]

    if not first:
        run_window(engine, GOOD, scale_wrt_gas=False)
        history.append(full_weights(engine))
    if where != "first backward":
        backward(forward(engine, GOOD[0]))
    if where == "loss":
        attempt(lambda: backward(Raise.apply(forward(engine, BAD))))
    elif where == "step":
        with broken_update(engine):
            attempt(engine.step)
    else:
        with broken_backward(engine):
            attempt(lambda: backward(forward(engine, BAD)))
    assert not engine.is_gradient_accumulation_boundary()
    attempt(lambda: engine.backward(torch.zeros((), requires_grad=True)))
    attempt(engine.step)
    samples = engine.global_samples
    engine.zero_grad()
    history += run_windows(engine, AFTER)
    report = {"said": said, "history": history, "samples": engine.global_samples - samples}
    engine.destroy()
    return report


@pytest.mark.parametrize("where", ["loss", "middle", "first backward", "step"])
@pytest.mark.parametrize(("stage", "offload"), MODES)
@pytest.mark.parametrize(("dtype", "accum_dtype"), [("fp32", None), ("bf16", "fp32")])
def test_failed_window_is_refused_until_it_is_dropped(
    ranks: RankPool, stage: int, offload: bool, dtype: str, accum_dtype: str | None, where: str
) -> None:
    config = mode_config(stage, offload, dtype=dtype, accum_dtype=accum_dtype)
    cause = "ArithmeticError" if where == "loss" else "ZeroDivisionError"
    for first in (True, False):
        expected = reference(same_on_all_ranks([*([] if first else [GOOD]), *AFTER]))
        for report in ranks.run(break_window, config=config, where=where, first=first):
            assert report["said"] == ["raised", cause, cause]
            assert report["history"] == expected
            assert report["samples"] == 4 * sum(len(window) for window in AFTER)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "zero",
    [
        {"overlap_comm": True},
        {"overlap_comm": True, "contiguous_gradients": False},
        {"contiguous_gradients": False},
        {"reduce_bucket_size": 16},
        {"stage3_param_persistence_threshold": 100000},
    ],
    ids=lambda zero: "-".join(f"{k}={v}" for k, v in zero.items()),
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_failed_window_with_zero_options(ranks: RankPool, stage: int, zero: dict[str, Any]) -> None:
    expected = reference(same_on_all_ranks([GOOD, *AFTER]))
    for where in ("middle", "step"):
        config = make_config(stage=stage, zero=zero)
        for report in ranks.run(break_window, config=config, where=where):
            assert report["history"] == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_failed_loss_backward(ranks: RankPool, stage: int) -> None:
    """Nobody sees this exception but the caller; the next call does see that no end came."""
    skip_without_torch_style(stage)
    expected = reference(same_on_all_ranks([GOOD, *AFTER]))
    for report in ranks.run(
        break_window, config=make_config(stage=stage), where="middle", style="torch"
    ):
        assert report["said"] == ["raised", "NoneType", "NoneType"]
        assert report["history"] == expected


def raise_in_forward(config: dict[str, Any]) -> list[Weights]:
    engine = make_engine(config)
    engine.backward(forward(engine, GOOD[0]), scale_wrt_gas=False)
    handle = engine.module.a.register_forward_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        forward(engine, BAD)
    handle.remove()
    engine.backward(forward(engine, GOOD[1]), scale_wrt_gas=False)
    engine.step()
    history = [full_weights(engine)]
    engine.destroy()
    return history


@pytest.mark.parametrize(("stage", "offload"), MODES)
def test_exception_in_forward_fails_nothing(ranks: RankPool, stage: int, offload: bool) -> None:
    config = mode_config(stage, offload)
    for history in ranks.run(raise_in_forward, config=config):
        assert history == reference(same_on_all_ranks([GOOD]))
