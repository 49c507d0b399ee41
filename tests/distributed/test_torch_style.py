"""loss.backward() instead of engine.backward(loss), where DeepSpeed supports it: stages 1 to 3."""

from __future__ import annotations

from typing import Any

import pytest
from harness.model import Weights, reference, same_on_all_ranks
from harness.pool import RankPool, RanksFailed
from harness.releases import HAS_TORCH_STYLE, skip_without_torch_style
from harness.training import STAGES, forward, full_weights, make_config, make_engine, run_window

MICRO = [{"a": seed, "b": seed} for seed in range(1, 8)]
WINDOWS = [MICRO[:2], MICRO[2:5], MICRO[5:6]]


def one_by_one(engine: Any, window: Any) -> None:
    for micro_batch in window:
        forward(engine, micro_batch).backward()


def forwards_first(engine: Any, window: Any) -> None:
    for loss in [forward(engine, micro_batch) for micro_batch in window]:
        loss.backward()


def sum_of_forwards(engine: Any, window: Any) -> None:
    sum(forward(engine, micro_batch) for micro_batch in window).backward()


def given_gradient(engine: Any, window: Any) -> None:
    import torch

    for micro_batch in window:
        loss = forward(engine, micro_batch)
        loss.backward(torch.ones_like(loss))


def mixed_with_engine_backward(engine: Any, window: Any) -> None:
    for index, micro_batch in enumerate(window):
        if index % 2:
            engine.backward(forward(engine, micro_batch), scale_wrt_gas=False)
        else:
            forward(engine, micro_batch).backward()


STYLES = {
    style.__name__: style
    for style in (
        one_by_one,
        forwards_first,
        sum_of_forwards,
        given_gradient,
        mixed_with_engine_backward,
    )
}


def train_style(style: str, config: dict[str, Any]) -> tuple[list[Weights], list[int]]:
    engine = make_engine(config)
    history, samples = [], []
    for window in WINDOWS:
        before = engine.global_samples
        STYLES[style](engine, window)
        engine.step()
        history.append(full_weights(engine))
        samples.append(engine.global_samples - before)
    engine.destroy()
    return history, samples


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1},
        {"stage": 1, "zero": {"overlap_comm": True}},
        {"stage": 1, "dtype": "bf16", "accum_dtype": "fp32"},
        {"stage": 2},
        {"stage": 2, "dtype": "bf16", "accum_dtype": "fp32"},
        {"stage": 3},
        {"stage": 3, "dtype": "bf16", "accum_dtype": "fp32"},
    ],
    ids=lambda o: "-".join(str(v) for v in o.values()),
)
def test_loss_backward(ranks: RankPool, style: str, options: dict[str, Any]) -> None:
    skip_without_torch_style(
        options["stage"], options.get("dtype", "fp32"), options.get("accum_dtype")
    )
    expected = reference(same_on_all_ranks(WINDOWS))
    for history, samples in ranks.run(train_style, style=style, config=make_config(**options)):
        assert history == expected
        # Four samples a backward: two per rank. What counts is backwards.
        per_window = [1, 1, 1] if style == "sum_of_forwards" else [len(w) for w in WINDOWS]
        assert samples == [4 * backwards for backwards in per_window]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_loss_backward_divides_by_gas_as_stock_does(ranks: RankPool, stage: int) -> None:
    skip_without_torch_style(stage)
    config = make_config(stage=stage, gas=4)
    expected = reference(same_on_all_ranks(WINDOWS), loss_scale=1 / 4)
    for style in ("one_by_one", "forwards_first"):
        for history, _ in ranks.run(train_style, style=style, config=config):
            assert history == expected


def unscaled_then_direct(config: dict[str, Any]) -> list[Weights]:
    engine = make_engine(config)
    run_window(engine, WINDOWS[0], scale_wrt_gas=False)
    history = [full_weights(engine)]
    one_by_one(engine, WINDOWS[1])
    engine.step()
    history.append(full_weights(engine))
    engine.destroy()
    return history


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_scale_wrt_gas_of_one_call_does_not_stick(ranks: RankPool, stage: int) -> None:
    """0.18.4-0.19.5 remember it for the next loss.backward()."""
    skip_without_torch_style(stage)
    by_window = [
        reference(same_on_all_ranks(WINDOWS[:2]), loss_scale=scale) for scale in (1.0, 1 / 4)
    ]
    for history in ranks.run(unscaled_then_direct, config=make_config(stage=stage, gas=4)):
        assert history[0] == by_window[0][0]
        # The second window moves the weights by a quarter of what the reference's moves them.
        for name, values in history[1].items():
            import torch

            after, before = torch.tensor(values), torch.tensor(history[0][name])
            full = torch.tensor(by_window[0][1][name]) - torch.tensor(by_window[0][0][name])
            assert torch.equal(after - before, full / 4)


def test_loss_backward_at_stage_0_is_refused_by_stock(ranks: RankPool) -> None:
    skip_without_torch_style(stage=0)
    with pytest.raises(RanksFailed, match=r"Direct calls to tensor.backward\(\)"):
        ranks.run(train_style, style="one_by_one", config=make_config(stage=0))


def refused_backward(config: dict[str, Any]) -> dict[str, Any]:
    from ds_unmanaged_gas import BoundaryError

    engine = make_engine(config)
    loss = forward(engine, MICRO[0])
    try:
        loss.backward()
        said = ""
    except BoundaryError as error:
        said = str(error)
    run_window(engine, MICRO[:2], scale_wrt_gas=False)
    report = {"said": said, "history": [full_weights(engine)]}
    engine.destroy()
    return report


@pytest.mark.skipif(HAS_TORCH_STYLE, reason="this DeepSpeed has loss.backward()")
@pytest.mark.parametrize("stage", STAGES)
def test_loss_backward_is_refused_before_it_accumulates(ranks: RankPool, stage: int) -> None:
    for report in ranks.run(refused_backward, config=make_config(stage=stage)):
        assert "call engine.backward(loss)" in report["said"]
        assert report["history"] == reference(same_on_all_ranks([MICRO[:2]]))
