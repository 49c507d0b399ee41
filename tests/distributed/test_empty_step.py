"""I3: step() with nothing accumulated is an update with zero gradients, on every stage alike."""

from __future__ import annotations

from typing import Any

import pytest
from harness.model import reference, same_on_all_ranks
from harness.pool import RankPool
from harness.training import (
    STAGES,
    full_weights,
    make_config,
    make_engine,
    run_window,
)

PRECISIONS = [
    pytest.param("fp32", None, id="fp32"),
    pytest.param("bf16", "bf16", id="bf16"),
    pytest.param("bf16", "fp32", id="bf16-fp32"),
    pytest.param("fp16", "fp16", id="fp16"),
]

FULL = [{"a": 1, "b": 1}, {"a": 2, "b": 2}]
WINDOWS = {
    "first of all": [[], FULL, FULL],
    "between windows": [FULL, [], FULL],
    "twice in a row": [FULL, [], [], FULL],
    "zero loss only": [FULL, [{}], FULL],
}


def train_and_count(windows: Any, config: dict[str, Any]) -> dict[str, Any]:
    import torch
    from deepspeed.utils import logger

    engine = make_engine(
        config, lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0)
    )
    warnings: list[str] = []
    original, logger.warning = logger.warning, lambda text, *_: warnings.append(text)
    report: dict[str, Any] = {"weights": [], "norms": [], "steps": []}
    try:
        for window in windows:
            run_window(engine, window, scale_wrt_gas=False)
            report["weights"].append(full_weights(engine))
            report["norms"].append(float(engine.get_global_grad_norm()))
            report["steps"].append((engine.global_steps, engine.was_step_applied()))
        report["schedule"] = engine.lr_scheduler.last_epoch
    finally:
        logger.warning = original
    report["warnings"] = [w for w in warnings if "without a backward()" in w]
    engine.destroy()
    return report


@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("dtype", "accum_dtype"), PRECISIONS)
def test_empty_step(
    ranks: RankPool, case: str, stage: int, dtype: str, accum_dtype: str | None
) -> None:
    windows = WINDOWS[case]
    config = make_config(stage=stage, dtype=dtype, accum_dtype=accum_dtype)
    for report in ranks.run(train_and_count, windows=windows, config=config):
        assert report["weights"] == reference(same_on_all_ranks(windows))
        assert [norm == 0.0 for norm in report["norms"]] == [w in ([], [{}]) for w in windows]
        assert report["steps"] == [(i + 1, True) for i in range(len(windows))]
        assert report["schedule"] == len(windows)
        assert len(report["warnings"]) == (1 if [] in windows else 0)


@pytest.mark.parametrize("stage", STAGES)
def test_empty_step_with_clipping(ranks: RankPool, stage: int) -> None:
    for options in ({}, {"dtype": "bf16", "accum_dtype": "fp32" if stage else None}):
        config = make_config(stage=stage, **options) | {"gradient_clipping": 1.0}
        first, second = ranks.run(train_and_count, windows=[FULL, [], [{}]], config=config)
        assert first["weights"] == second["weights"]
        assert first["weights"][0] == first["weights"][1] == first["weights"][2]
        assert first["norms"][0] > 1.0
        assert first["norms"][1:] == [0.0, 0.0]
