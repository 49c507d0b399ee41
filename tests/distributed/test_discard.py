"""engine.zero_grad() drops the open window, wherever its gradients are."""

from __future__ import annotations

from typing import Any

import pytest
from harness.model import Weights, reference, same_on_all_ranks
from harness.pool import RankPool
from harness.releases import STAGE2_KEEPS_THE_LAST_ONLY
from harness.training import (
    STAGES,
    forward,
    full_weights,
    make_config,
    make_engine,
    mode_config,
)

AB = {"a": 1, "b": 1}

# Per window: micro-batches that are dropped, and those that count after them.
PLAN: list[tuple[list[dict[str, int]], list[dict[str, int]]]] = [
    ([{"a": 1, "b": 1}, {"a": 2}], [{"a": 3, "b": 3}]),  # in the very first window
    ([], [{"a": 4, "b": 4}, {"b": 5}]),
    ([{"a": 6, "b": 6}], []),  # dropped, then step() with nothing
    ([{"b": 7}, {"b": 8}], [{"a": 9}, {"a": 10}]),  # b is in the dropped part only
    ([{"a": 11, "b": 11}], [{"a": 12, "b": 12}]),
]


def train_and_drop(config: dict[str, Any], factor: float = 1.0) -> tuple[list[Weights], list[int]]:
    engine = make_engine(config)
    history, samples = [], []
    for dropped, kept in PLAN:
        for micro_batch in dropped:
            engine.backward(forward(engine, micro_batch) * factor, scale_wrt_gas=False)
        engine.zero_grad()
        for micro_batch in kept:
            engine.backward(forward(engine, micro_batch), scale_wrt_gas=False)
        engine.step()
        history.append(full_weights(engine))
        samples.append(engine.global_samples)
    assert engine.skipped_steps == 0
    engine.destroy()
    return history, samples


@pytest.mark.parametrize("offload", [False, True], ids=["no-offload", "offload"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("dtype", "accum_dtype"),
    [("fp32", None), ("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32")],
)
def test_dropped_window(
    ranks: RankPool, stage: int, dtype: str, accum_dtype: str | None, offload: bool
) -> None:
    if stage == 0 and offload:
        pytest.skip("DeepSpeed has no optimizer offload at stage 0")
    config = mode_config(stage, offload, dtype=dtype, accum_dtype=accum_dtype)
    kept = [window for _, window in PLAN]
    counts = [4 * sum(len(w) for w in kept[: i + 1]) for i in range(len(kept))]
    # An infinite gradient in the dropped part leaves no overflow behind.
    for factor in (1.0, float("inf")) if dtype == "fp16" else (1.0,):
        for history, samples in ranks.run(train_and_drop, config=config, factor=factor):
            assert history == reference(same_on_all_ranks(kept))
            assert samples == counts


def stock_drop(config: dict[str, Any]) -> list[Weights]:
    """Two backwards in a window of GAS 3, dropped, then one more and the step."""
    engine = make_engine(config)
    for number in range(3):
        engine.set_gradient_accumulation_boundary(number == 2)
        engine.backward(forward(engine, AB) * 1.0, scale_wrt_gas=False)
        if number == 1:
            engine.zero_grad()
    engine.step()
    weights = [full_weights(engine)]
    engine.destroy()
    return weights


@pytest.mark.parametrize("stage", [2, 3])
def test_control_stock_zero_grad_drops_nothing(ranks: RankPool, stage: int) -> None:
    if stage == 2 and STAGE2_KEEPS_THE_LAST_ONLY:
        pytest.skip("this release drops all but the last backward anyway")
    config = make_config(stage=stage, unmanaged=False)
    expected = reference(same_on_all_ranks([[AB]]))
    assert ranks.run(stock_drop, plugin=False, config=config) != [expected, expected]
