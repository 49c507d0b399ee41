"""I7: managed engines run stock code, bit for bit, whether or not the plugin is enabled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.counting import WrapperCalls
from harness.model import Layers, Weights, reference, same_on_all_ranks
from harness.pool import RankPool
from harness.training import STAGES, full_weights, make_config, make_engine, mode_config, run_window

GAS = 3


class Curved(torch.nn.Module):
    """Not linear, so that every rounding in the history shows in the weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def managed_run(config: dict[str, Any], *, with_unmanaged: bool) -> dict[str, Any]:
    """Train a managed engine; optionally an unmanaged one in turn with it."""
    import deepspeed

    import ds_unmanaged_gas

    managed = make_engine(config, model=Curved(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
    other = None
    windows = [[{"a": 2 * w, "b": 2 * w + 1}] * (w % 3 + 1) for w in range(9)]
    if with_unmanaged:
        stage = config["zero_optimization"]["stage"]
        other = make_engine(make_config(stage=stage))
        assert ds_unmanaged_gas.is_unmanaged(other)
        assert not ds_unmanaged_gas.is_unmanaged(managed)
        assert managed.managed_gradient_accumulation()
        assert not other.managed_gradient_accumulation()
    report: dict[str, Any] = {"weights": [], "other": []}
    generator = torch.Generator().manual_seed(deepspeed.comm.get_rank())
    for step in range(9):
        x = torch.randn(4, 8, generator=generator).to(managed.device)
        loss = managed(x)
        report.setdefault("returned", []).append(float(managed.backward(loss)))
        if other is not None:
            run_window(other, windows[step], scale_wrt_gas=False)
            report["other"].append(full_weights(other))
        managed.step()
        report.setdefault("boundary", []).append(managed.is_gradient_accumulation_boundary())
        report.setdefault("applied", []).append(managed.was_step_applied())
        report["weights"].append(full_weights(managed))
    report["counters"] = (managed.global_steps, managed.global_samples, managed.micro_steps)
    norm = managed.get_global_grad_norm()
    report["norm"] = None if norm is None else float(norm)
    managed.destroy()
    if other is not None:
        other.destroy()
    return report


@pytest.mark.parametrize("stage", STAGES)
def test_managed_engine_beside_an_unmanaged_one(ranks: RankPool, stage: int) -> None:
    config = make_config(stage=stage, gas=GAS, unmanaged=False)
    stock = ranks.run(managed_run, plugin=False, config=config, with_unmanaged=False)
    beside = ranks.run(managed_run, config=config, with_unmanaged=True)
    alone = ranks.run(managed_run, config=config, with_unmanaged=False)
    windows = [[{"a": 2 * w, "b": 2 * w + 1}] * (w % 3 + 1) for w in range(9)]
    expected = reference(same_on_all_ranks(windows))
    for one, two, three in zip(stock, beside, alone):
        history: list[Weights] = two.pop("other")
        assert history == expected
        assert one.pop("other") == three.pop("other") == []
        assert one == two == three
        assert one["applied"] == [False, False, True] * 3


def flag_true_run(config: dict[str, Any]) -> bool:
    import ds_unmanaged_gas

    engine = make_engine(config)
    unmanaged = ds_unmanaged_gas.is_unmanaged(engine)
    engine.destroy()
    return unmanaged


def test_flag_true_is_managed(ranks: RankPool) -> None:
    config = make_config(stage=1, unmanaged=False, managed_gradient_accumulation=True)
    assert ranks.run(flag_true_run, config=config) == [False, False]


def wrapper_calls(config: dict[str, Any], num_layers: int) -> dict[str, int]:
    """The wrappers that one forward and backward, and one step, of a managed engine call."""
    from ds_unmanaged_gas import engine as wrappers

    engine = make_engine(config, model=Layers(num_layers, 4))
    x = torch.ones(1, 4, device=engine.device)
    report = {}
    with WrapperCalls(wrappers.patches()) as calls:
        engine.backward(engine(x) * 1.0)
        report["backward"] = sum(calls.calls.values())
        engine.step()
    report["step"] = sum(calls.calls.values()) - report["backward"]
    engine.destroy()
    return report


@pytest.mark.parametrize(("stage", "offload"), [*((s, False) for s in STAGES), (2, True)])
def test_managed_engine_calls_few_wrappers(ranks: RankPool, stage: int, offload: bool) -> None:
    """None per parameter, and none of what stock code asks many times in a backward."""
    config = mode_config(stage, offload, gas=1, unmanaged=False)
    few = ranks.run(wrapper_calls, config=config, num_layers=1)
    assert ranks.run(wrapper_calls, config=config, num_layers=30) == few
    for calls in few:
        # forward(), backward() and three hooks around it; step(), _take_model_step(), zero_grad().
        assert 2 <= calls["backward"] <= 5
        assert 2 <= calls["step"] <= 3
