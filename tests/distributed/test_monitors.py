"""Reports and profilers see each window as it was, whatever its number of backwards."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.model import LEARNING_RATE, Heads
from harness.pool import RankPool
from harness.releases import HAS_TORCH_STYLE, between
from harness.training import STAGES, forward, make_config, make_engine

COUNTS = [2, 5, 1, 3]


def run(config: dict[str, Any], style: str = "engine", warm: bool = False) -> dict[str, list[Any]]:
    """Windows of COUNTS micro-batches under a learning rate that halves with every step."""
    from deepspeed.utils import logger

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            report["logged"].append(record.getMessage())

    report: dict[str, list[Any]] = {"logged": [], "samples": []}
    listener, level = Listener(), logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)  # WARNING on some releases, which print timers instead
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_windows(config, style, report)
    report["logged"] += printed.getvalue().splitlines()
    logger.removeHandler(listener)
    logger.setLevel(level)
    return report


def run_windows(config: dict[str, Any], style: str, report: dict[str, list[Any]]) -> None:
    engine = make_engine(
        config,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 0.5**i),
    )
    for number, count in enumerate(COUNTS):
        for _ in range(count):
            loss = forward(engine, {"a": number, "b": number})
            if style == "torch":
                loss.backward()
            else:
                engine.backward(loss)
        engine.step()
        report["samples"].append(engine.global_samples)
    engine.destroy()


def samples() -> list[int]:
    return [4 * sum(COUNTS[: i + 1]) for i in range(len(COUNTS))]


@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("stage", STAGES)
def test_csv_monitor_has_the_real_samples_on_its_axis(
    ranks: RankPool, tmp_path: Path, stage: int, style: str
) -> None:
    if style == "torch" and (stage == 0 or not HAS_TORCH_STYLE):
        pytest.skip("DeepSpeed has no loss.backward() here")
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = make_config(stage=stage, gas=4, csv_monitor=monitor)
    for report in ranks.run(run, config=config, style=style):
        assert report["samples"] == samples()
    (path,) = tmp_path.glob("job/*lr*.csv")
    with path.open() as file:
        _, *rows = csv.reader(file)
    assert [int(row[0]) for row in rows] == samples()
    assert [float(row[1]) for row in rows] == [LEARNING_RATE / 2 ** (i + 1) for i in range(4)]


def test_tensorboard_monitor_has_the_real_samples_on_its_axis(
    ranks: RankPool, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    ranks.run(run, config=make_config(stage=2, gas=4, tensorboard=monitor))
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    (tag,) = (tag for tag in events.Tags()["scalars"] if "lr" in tag)
    points = events.Scalars(tag)
    assert [point.step for point in points] == samples()
    assert [point.value for point in points] == [LEARNING_RATE / 2 ** (i + 1) for i in range(4)]


@pytest.mark.parametrize("stage", STAGES)
def test_steps_per_print_counts_windows(ranks: RankPool, stage: int) -> None:
    config = make_config(stage=stage, gas=4) | {"steps_per_print": 2}
    logged = "\n".join(ranks.run(run, config=config)[0]["logged"])
    # Some releases report step 0 when the engine is built.
    assert re.findall(r"step=([1-9]\d*), skipped=(\d+)", logged) == [("2", "0"), ("4", "0")]


@pytest.mark.parametrize("stage", STAGES)
def test_wall_clock_breakdown_is_per_micro_batch(ranks: RankPool, stage: int) -> None:
    config = make_config(stage=stage, gas=4, wall_clock_breakdown=True)
    logged = ranks.run(run, config=config)[0]["logged"]
    lines = [line for line in logged if "fwd_microstep" in line]
    # One for each backward; one for each step, with what step() itself took.
    assert len(lines) == sum(COUNTS) + len(COUNTS)
    assert sum("| fwd:" in line for line in logged) == len(COUNTS)


def test_flops_profiler_reports_the_window_of_its_step(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "flops.txt"
    profiler = {"enabled": True, "profile_step": 1, "output_file": str(path)}
    config = make_config(stage=1, flops_profiler=profiler)
    for report in ranks.run(run, config=config):
        assert report["samples"] == samples()
    text = path.read_text()
    # (4 x 4 weights and 4 biases) and (6 x 4 and 4), as they are.
    assert re.search(r"params per (GPU|Device).*48", text, re.IGNORECASE), text[:2000]


@pytest.mark.skipif(between("0.19.8"), reason="this DeepSpeed has no legacy curriculum learning")
def test_curriculum_moves_with_the_steps(ranks: RankPool) -> None:
    curriculum = {
        "enabled": True,
        "curriculum_type": "other",
        "min_difficulty": 1,
        "max_difficulty": 4,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 1},
    }
    config = make_config(stage=1, gas=4, curriculum_learning=curriculum)
    for seen in ranks.run(difficulties, config=config):
        assert seen == [[difficulty] * count for difficulty, count in zip((1, 2, 3, 4), COUNTS)]


def difficulties(config: dict[str, Any]) -> list[list[int]]:
    engine = make_engine(config)
    seen = []
    for count in COUNTS:
        in_window = []
        for _ in range(count):
            engine.backward(forward(engine, {"a": 1, "b": 1}))
            in_window.append(int(engine.curriculum_scheduler_legacy.get_current_difficulty()))
        engine.step()
        seen.append(in_window)
    engine.destroy()
    return seen


class Dropping(Heads):
    """Notes what DeepSpeed tells a model that drops layers."""

    def forward(self, batch: Any, **told: Any) -> torch.Tensor:
        self.told = told
        return super().forward(batch)


def kept(config: dict[str, Any]) -> list[list[float]]:
    model = Dropping()
    engine = make_engine(config, model=model)
    seen = []
    for count in COUNTS:
        in_window = []
        for _ in range(count):
            engine.backward(forward(engine, {"a": 1, "b": 1}))
            in_window.append(float(model.told["pld_theta"]))
        engine.step()
        seen.append(in_window)
    engine.destroy()
    return seen


@pytest.mark.skipif(between("0.19.8"), reason="this DeepSpeed has no progressive layer drop")
def test_progressive_layer_drop_moves_with_the_steps(ranks: RankPool) -> None:
    theta, gamma = 0.5, 0.25
    config = make_config(stage=1, gas=4)
    config["progressive_layer_drop"] = {"enabled": True, "theta": theta, "gamma": gamma}
    # Updated inside a step, by the number of steps before it.
    steps = [0, *range(len(COUNTS) - 1)]
    expected = [(1 - theta) * math.exp(-gamma * step) + theta for step in steps]
    for seen in ranks.run(kept, config=config):
        assert seen == [[share] * count for share, count in zip(expected, COUNTS)]
