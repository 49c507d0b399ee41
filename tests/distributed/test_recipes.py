"""The loops of other projects that the README has a recipe for, and the numbers that it prints.

One weight, a loss that is linear in it, SGD with a learning rate of 1: what a micro-batch adds to
the gradient is a number that is chosen here, and the update is their sum.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.releases import between
from harness.training import STAGES, full_weights, make_config, make_engine

import ds_unmanaged_gas


class Weight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def forward(self, gradient: float) -> torch.Tensor:
        return self.weight[0] * gradient


def updates(config: dict[str, Any], *, loop: str, windows: int = 2) -> list[float]:
    """What each of several equal windows adds to the weight."""
    engine = make_engine(config, model=Weight(), optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    before, result = 0.0, []
    for _ in range(windows):
        LOOPS[loop](engine)
        (value, *_) = full_weights(engine)["weight"]
        result.append(value - before)
        before = value
    engine.destroy()
    return result


def own_schedule(engine: Any) -> None:
    """OpenRLHF's dynamic batches, open-instruct's GRPO: step() when their own count says so."""
    for gradient in (1.0, 2.0, 3.0):
        engine.backward(engine(gradient))
    engine.step()


def requests_with_setter(engine: Any) -> None:
    """Arctic-Platform's server: one logical step arrives as several requests, each of which marks
    its last micro-batch as the boundary."""
    for request in ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)):
        for gradient in request:
            engine.set_gradient_accumulation_boundary(gradient == request[-1])
            engine.backward(engine(gradient))
    engine.step()


def requests(engine: Any) -> None:
    """The same without the setter, and with an evaluation between requests, as SkyRL's test."""
    for request in ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)):
        for gradient in request:
            engine.backward(engine(gradient))
        with torch.no_grad():
            engine(7.0)
    engine.step()


TOKENS = ((18.0, 3), (7.0, 1))
"""The sum of a micro-batch's token gradients, and how many tokens it has."""


def means_of_means(engine: Any) -> None:
    """Each micro-batch by its own tokens, since the total is not known yet: open-instruct, trl."""
    for gradient, num_tokens in TOKENS:
        engine.backward(engine(gradient) / num_tokens / len(TOKENS))
    engine.step()


def by_tokens(engine: Any) -> None:
    window = ds_unmanaged_gas.accumulation(engine)
    for gradient, num_tokens in TOKENS:
        window.backward(engine(gradient), num_items=num_tokens)
    window.step()


LOOPS = {
    f.__name__: f for f in (own_schedule, requests_with_setter, requests, means_of_means, by_tokens)
}

BY_ITEMS = {"unmanaged_gradient_accumulation": {"gradient_scale": "num_items"}}


@pytest.mark.thorough
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("loop", "options", "right"),
    [
        ("own_schedule", {}, -6.0),
        ("requests", {}, -21.0),
        ("by_tokens", BY_ITEMS, -6.25),
    ],
)
def test_unmanaged_loops_lose_nothing(
    ranks: Any, stage: int, loop: str, options: dict[str, Any], right: float
) -> None:
    config = make_config(stage=stage, **options)
    assert ranks.run(updates, config=config, loop=loop) == [[right, right]] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("loop", "right", "last"),
    [
        ("own_schedule", -6.0, -3.0),
        ("requests", -21.0, -6.0),
        ("requests_with_setter", -21.0, -11.0),
    ],
)
def test_managed_loops_keep_the_last_backwards_only_control(
    ranks: Any, stage: int, loop: str, right: float, last: float
) -> None:
    """Stages 1 and 2 begin anew after every boundary, and with GAS 1 every backward is one."""
    if not between("0.18.3"):
        pytest.skip("earlier releases differ: up to 0.16.4 nothing is lost")
    config = make_config(stage=stage, unmanaged=False)
    expected = last if stage in (1, 2) else right
    assert ranks.run(updates, plugin=False, config=config, loop=loop) == [[expected] * 2] * 2


def test_a_mean_of_means_is_not_the_mean_over_tokens_control(ranks: Any) -> None:
    config = make_config(stage=3, unmanaged=False)
    result = ranks.run(updates, plugin=False, config=config, loop="means_of_means")
    assert result == [[-6.5, -6.5]] * 2
