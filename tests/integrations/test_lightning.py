"""Lightning's DeepSpeed strategy runs on GPUs alone; its precision plugin, which makes the calls of
an engine, does not need one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.pool import RanksFailed
from harness.training import full_weights, make_config, make_engine
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision


class Weight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def forward(self, gradient: float) -> torch.Tensor:
        return self.weight[0] * gradient


def steps(config: dict[str, Any], *, accumulate_grad_batches: int, automatic: bool) -> list[float]:
    """What Trainer has the plugin do for two batches. Returns the weight after each."""
    engine = make_engine(config, model=Weight(), optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    module = LightningModule()
    module.automatic_optimization = automatic
    batches = accumulate_grad_batches
    module._trainer = SimpleNamespace(model=engine, accumulate_grad_batches=batches)
    plugin = DeepSpeedPrecision("32-true")
    plugin._after_closure = lambda *_: None  # callbacks
    history = []
    for gradient in (1.0, 2.0):

        def closure(gradient: float = gradient) -> torch.Tensor:
            loss = engine(gradient)
            plugin.backward(loss, module, None)
            return loss

        plugin.optimizer_step(optimizer=None, model=module, closure=closure)
        history.append(full_weights(engine)["weight"][0])
    engine.destroy()
    return history


def test_accumulate_grad_batches_is_refused(ranks: Any) -> None:
    task = {"config": make_config(stage=2, gas=2), "accumulate_grad_batches": 2}
    with pytest.raises(RanksFailed, match=r"accumulate_grad_batches = 2: Lightning's Trainer"):
        ranks.run(steps, **task, automatic=True)


def test_accumulate_grad_batches_works_managed_control(ranks: Any) -> None:
    config = make_config(stage=2, gas=2, unmanaged=False)
    result = ranks.run(steps, config=config, accumulate_grad_batches=2, automatic=True)
    assert result == [[0.0, -1.5]] * 2


@pytest.mark.parametrize("automatic", [True, False])
def test_every_step_is_an_update(ranks: Any, automatic: bool) -> None:
    config = make_config(stage=2)
    result = ranks.run(steps, config=config, accumulate_grad_batches=1, automatic=automatic)
    assert result == [[-1.0, -3.0]] * 2
