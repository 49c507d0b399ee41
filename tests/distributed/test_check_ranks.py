"""``"check_ranks": true``: ranks that would issue different collectives are told so instead."""

from __future__ import annotations

from typing import Any

import pytest
from harness.model import Weights, reference
from harness.pool import RankPool
from harness.training import (
    forward,
    full_weights,
    make_config,
    make_engine,
    mode_config,
    run_window,
    train,
)

AB = {"a": 1, "b": 1}
CHECK = {"unmanaged_gradient_accumulation": {"check_ranks": True}}


def differ(config: dict[str, Any], counts: list[int]) -> tuple[list[str], list[Weights]]:
    """A window of another length on each rank, dropped by both, then a good one."""
    import deepspeed

    import ds_unmanaged_gas

    engine = make_engine(config)
    said = []
    try:
        run_window(engine, [AB] * counts[deepspeed.comm.get_rank()], scale_wrt_gas=False)
        said.append("no error")
    except ds_unmanaged_gas.RanksDifferError as error:
        said.append(str(error))
    engine.zero_grad()
    run_window(engine, [AB, AB], scale_wrt_gas=False)
    weights = [full_weights(engine)]
    engine.destroy()
    return said, weights


@pytest.mark.parametrize("counts", [[3, 2], [0, 1], [1, 4]], ids=str)
@pytest.mark.parametrize("offload", [False, True], ids=["no-offload", "offload"])
@pytest.mark.parametrize("stage", [2, 3])
def test_different_numbers_of_backwards_are_named_on_every_rank(
    ranks: RankPool, stage: int, offload: bool, counts: list[int]
) -> None:
    config = mode_config(stage, offload, **CHECK)
    expected = reference([[[AB, AB]]] * 2)
    fewer = min(counts)
    for said, weights in ranks.run(differ, config=config, counts=counts, timeout=60):
        call = "forward()" if stage == 3 else "backward()"
        texts = [
            f"rank {rank}: {'step()' if count == fewer else call} after {fewer} backwards"
            for rank, count in enumerate(counts)
        ]
        assert "; ".join(texts) in said[0]
        assert weights == expected


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_0_and_1_may_differ(ranks: RankPool, stage: int) -> None:
    one, other = [[AB, {"a": 2}], []], [[{"b": 3}], [AB]]
    config = make_config(stage=stage, **CHECK)
    for history in ranks.run(train, windows_by_rank=[one, other], config=config):
        assert history == reference([one, other])


@pytest.mark.parametrize("stage", [2, 3])
def test_same_calls_pass(ranks: RankPool, stage: int) -> None:
    windows = [[AB], [AB, {"a": 2}], []]
    config = make_config(stage=stage, **CHECK)
    for history in ranks.run(train, windows_by_rank=[windows] * 2, config=config):
        assert history == reference([windows] * 2)


def fail_on_one_rank(config: dict[str, Any]) -> tuple[str, list[Weights]]:
    import deepspeed

    import ds_unmanaged_gas

    engine = make_engine(config)
    handle = None
    if deepspeed.comm.get_rank() == 1:
        handle = engine.module.a.bias.register_hook(lambda _: 1 / 0)
    said = ""
    for call in (lambda: engine.backward(forward(engine, AB)), engine.step):
        try:
            call()
        except (ZeroDivisionError, ds_unmanaged_gas.UnmanagedGasError) as error:
            said += f"{type(error).__name__}: {error}\n"
    if handle is not None:
        handle.remove()
    engine.zero_grad()
    run_window(engine, [AB], scale_wrt_gas=False)
    weights = [full_weights(engine)]
    engine.destroy()
    return said, weights


@pytest.mark.parametrize("stage", [0, 1])
def test_a_failed_window_on_one_rank_stops_all(ranks: RankPool, stage: int) -> None:
    healthy, failed = ranks.run(fail_on_one_rank, config=make_config(stage=stage, **CHECK))
    assert "RanksDifferError" in healthy[0]
    assert "rank 1: step() after 0 backwards, failed" in healthy[0]
    assert failed[0].startswith("ZeroDivisionError")
    assert "WindowFailedError" in failed[0]
    for _, weights in (healthy, failed):
        assert weights == reference([[[AB]]] * 2)
