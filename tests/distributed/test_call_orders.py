"""I2 does not depend on how many forwards, phases or losses a backward has."""

from __future__ import annotations

from typing import Any

import pytest
from harness.model import Weights, reference, same_on_all_ranks
from harness.pool import RankPool
from harness.training import (
    STAGES,
    batch_for,
    forward,
    full_weights,
    make_config,
    make_engine,
    run_window,
)

PRECISIONS = [
    pytest.param("fp32", None, id="fp32"),
    pytest.param("bf16", "bf16", id="bf16"),
    pytest.param("bf16", "fp32", id="bf16-fp32"),
]


def micro_batches(*seeds: int) -> list[dict[str, int]]:
    return [{"a": seed, "b": seed} for seed in seeds]


# What the three windows of every case below amount to. The first and the last are plain: they show
# what the case in the middle found and left.
WINDOWS = [micro_batches(1, 2), micro_batches(3, 4, 5), micro_batches(6)]


def forwards_first(engine: Any) -> None:
    losses = [forward(engine, micro_batch) for micro_batch in WINDOWS[1]]
    for loss in losses:
        engine.backward(loss, scale_wrt_gas=False)


def backwards_in_reverse_order(engine: Any) -> None:
    losses = [forward(engine, micro_batch) for micro_batch in WINDOWS[1]]
    for loss in reversed(losses):
        engine.backward(loss, scale_wrt_gas=False)


def one_backward_over_all_forwards(engine: Any) -> None:
    engine.backward(sum(forward(engine, m) for m in WINDOWS[1]), scale_wrt_gas=False)


def module_instead_of_engine(engine: Any) -> None:
    for micro_batch in WINDOWS[1]:
        engine.backward(engine.module(batch_for(engine, micro_batch)), scale_wrt_gas=False)


def module_and_engine_in_turn(engine: Any) -> None:
    for index, micro_batch in enumerate(WINDOWS[1]):
        model = engine if index == 1 else engine.module
        engine.backward(model(batch_for(engine, micro_batch)), scale_wrt_gas=False)


def evaluation_in_between(engine: Any) -> None:
    import torch

    for micro_batch in WINDOWS[1]:
        engine.backward(forward(engine, micro_batch), scale_wrt_gas=False)
        engine.eval()
        with torch.no_grad():
            forward(engine, {"a": 9, "b": 9})
        engine.train()


def forward_thrown_away(engine: Any) -> None:
    for micro_batch in WINDOWS[1]:
        forward(engine, {"a": 9, "b": 9})
        engine.backward(forward(engine, micro_batch), scale_wrt_gas=False)


def two_losses_on_one_forward(engine: Any) -> None:
    for micro_batch in WINDOWS[1]:
        loss = forward(engine, micro_batch)
        engine.backward(loss * 2, retain_graph=True, scale_wrt_gas=False)
        engine.backward(loss * -1, scale_wrt_gas=False)


CASES = {
    case.__name__: case
    for case in (
        forwards_first,
        backwards_in_reverse_order,
        one_backward_over_all_forwards,
        module_instead_of_engine,
        module_and_engine_in_turn,
        evaluation_in_between,
        forward_thrown_away,
        two_losses_on_one_forward,
    )
}


def train_case(case: str, config: dict[str, Any]) -> list[Weights]:
    engine = make_engine(config)
    run_window(engine, WINDOWS[0], scale_wrt_gas=False)
    history = [full_weights(engine)]
    CASES[case](engine)
    engine.step()
    history.append(full_weights(engine))
    run_window(engine, WINDOWS[2], scale_wrt_gas=False)
    history.append(full_weights(engine))
    engine.destroy()
    return history


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("dtype", "accum_dtype"), PRECISIONS)
def test_order_of_calls(
    ranks: RankPool, case: str, stage: int, dtype: str, accum_dtype: str | None
) -> None:
    config = make_config(stage=stage, dtype=dtype, accum_dtype=accum_dtype)
    expected = reference(same_on_all_ranks(WINDOWS))
    for history in ranks.run(train_case, case=case, config=config):
        assert history == expected


@pytest.mark.parametrize("case", ["two_losses_on_one_forward", "forwards_first"])
def test_order_of_calls_with_persistent_parameters(ranks: RankPool, case: str) -> None:
    config = make_config(stage=3, zero={"stage3_param_persistence_threshold": 100000})
    expected = reference(same_on_all_ranks(WINDOWS))
    for history in ranks.run(train_case, case=case, config=config):
        assert history == expected
