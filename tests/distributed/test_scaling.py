"""Who divides by gradient_accumulation_steps, and the dtype in which a window is summed."""

from __future__ import annotations

from typing import Any

import pytest
from harness.model import reference, same_on_all_ranks
from harness.pool import RankPool
from harness.training import STAGES, forward, full_weights, make_config, make_engine, train

GAS = 4
WINDOWS = [[{"a": 3 * w + m, "b": 3 * w + m} for m in range(n)] for w, n in enumerate((3, 1, 4))]

CONFIGS = [
    *({"stage": stage} for stage in STAGES),
    {"stage": 0, "dtype": "bf16", "accum_dtype": "bf16"},
    {"stage": 1, "dtype": "bf16", "accum_dtype": "fp32"},
    {"stage": 3, "dtype": "bf16", "accum_dtype": "fp32"},
    {"stage": 0, "dtype": "fp16", "accum_dtype": "fp16"},
    {"stage": 2, "dtype": "fp16", "accum_dtype": "fp16"},
]
by_config = pytest.mark.parametrize(
    "options", CONFIGS, ids=lambda o: "-".join(str(v) for v in o.values())
)


@pytest.mark.thorough
@by_config
@pytest.mark.parametrize("scale_wrt_gas", [True, False])
def test_division_by_gas_at_backward(
    ranks: RankPool, options: dict[str, Any], scale_wrt_gas: bool
) -> None:
    """The loss is the module's own output here, whose hooks divide on some releases too."""
    windows = same_on_all_ranks(WINDOWS)
    expected = reference(windows, loss_scale=1 / GAS if scale_wrt_gas else 1.0)
    for history in ranks.run(
        train,
        windows_by_rank=windows,
        config=make_config(gas=GAS, **options),
        backward={"scale_wrt_gas": scale_wrt_gas},
    ):
        assert history == expected


def returned_losses(config: dict[str, Any], model: str) -> list[float]:
    engine = make_engine(config)
    call = engine if model == "engine" else engine.module
    from harness.training import batch_for

    returned = []
    for arguments in ({}, {"scale_wrt_gas": True}, {"scale_wrt_gas": False}):
        loss = call(batch_for(engine, {"a": 1}))
        returned.append(float(engine.backward(loss, **arguments)) / float(loss))
    engine.step()
    engine.destroy()
    return returned


@by_config
@pytest.mark.parametrize("model", ["engine", "module"])
def test_backward_returns_the_loss_as_scaled(
    ranks: RankPool, options: dict[str, Any], model: str
) -> None:
    for returned in ranks.run(returned_losses, config=make_config(gas=GAS, **options), model=model):
        assert returned == [1 / GAS, 1 / GAS, 1.0]


def train_256_then_64_ones(config: dict[str, Any]) -> float:
    import torch

    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(8))

        def forward(self, x: float) -> Any:
            return self.w.sum() * x

    engine = make_engine(config, model=One(), optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    for x in [256.0] + [1.0] * 64:
        engine.backward(engine(x), scale_wrt_gas=False)
    engine.step()
    weight = full_weights(engine)["w"]
    engine.destroy()
    assert weight == [weight[0]] * 8
    return float(weight[0])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_long_window_sums_in_the_accumulation_dtype(
    ranks: RankPool, stage: int, dtype: str
) -> None:
    """256 + 64 * 1. In bf16, 256 + 1 is 256 again."""
    config = make_config(stage=stage, dtype=dtype, accum_dtype="fp32")
    assert ranks.run(train_256_then_64_ones, config=config) == [-320.0, -320.0]


def test_long_window_loses_small_gradients_in_bf16(ranks: RankPool) -> None:
    """Shows that the test above can fail."""
    config = make_config(stage=2, dtype="bf16", accum_dtype="bf16")
    assert ranks.run(train_256_then_64_ones, config=config) == [-256.0, -256.0]


def step_after_a_window_that_overflows(config: dict[str, Any], bad: int) -> dict[str, Any]:
    """Three windows; one micro-batch of the second is infinite."""
    engine = make_engine(config)
    report: dict[str, Any] = {"weights": [], "applied": []}
    for window in range(3):
        for micro in range(3):
            loss = forward(engine, {"a": 3 * window + micro, "b": 3 * window + micro})
            if window == 1 and micro == bad:
                loss = loss * float("inf")
            engine.backward(loss, scale_wrt_gas=False)
        engine.step()
        report["weights"].append(full_weights(engine))
        report["applied"].append(engine.was_step_applied())
    report["skipped"] = engine.skipped_steps
    engine.destroy()
    return report


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("accum_dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("stage", STAGES)
def test_overflow_skips_its_window_and_no_other(
    ranks: RankPool, stage: int, accum_dtype: str, bad: int
) -> None:
    config = make_config(stage=stage, dtype="fp16", accum_dtype=accum_dtype)
    windows = [[{"a": 3 * w + m, "b": 3 * w + m} for m in range(3)] for w in (0, 2)]
    expected = reference(same_on_all_ranks(windows))
    for report in ranks.run(step_after_a_window_that_overflows, config=config, bad=bad):
        assert report["weights"] == [expected[0], expected[0], expected[1]]
        assert report["applied"] == [True, False, True]
        assert report["skipped"] == 1
