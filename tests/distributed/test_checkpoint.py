"""Checkpoints around a window: saving leaves it alone, loading drops it, resuming is exact."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.model import LEARNING_RATE, Weights, reference, same_on_all_ranks
from harness.pool import RankPool, RanksFailed
from harness.releases import uses_fp16_optimizer
from harness.training import (
    MODES,
    broken_backward,
    forward,
    full_weights,
    make_config,
    make_engine,
    mode_config,
    run_window,
    run_windows,
)

A, B, AB = {"a": 1}, {"b": 2}, {"a": 3, "b": 3}
BEFORE = [[AB, A], [B, AB]]
OPEN = [AB, A, AB]
AFTER = [[B], [A, AB, AB], [AB]]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Sums of halves: exact in binary, and wrong after a resume that loses optimizer state."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.5)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


OPTIMIZERS = {"momentum": momentum, "adam": adam}


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train_and_save(
    config: dict[str, Any], folder: str
) -> tuple[list[Weights], tuple[int, ...], int]:
    """BEFORE, a save in the middle of OPEN, the rest of it, AFTER."""
    from deepspeed.utils import logger

    listener = Listener()
    logger.addHandler(listener)
    engine = make_engine(config, optimizer=momentum)
    history = run_windows(engine, BEFORE)
    for number, micro_batch in enumerate(OPEN):
        engine.backward(forward(engine, micro_batch), scale_wrt_gas=False)
        if number < 2:
            engine.save_checkpoint(folder, tag="open")
    engine.step()
    history.append(full_weights(engine))
    history += run_windows(engine, AFTER)
    counters = (engine.global_steps, engine.global_samples)
    engine.destroy()
    logger.removeHandler(listener)
    warnings = sum("does not save the gradients" in message for message in listener.messages)
    return history, counters, warnings


def load_and_train(
    config: dict[str, Any],
    folder: str,
    into: str,
    tag: str = "open",
    kind: str = "momentum",
) -> tuple[list[Weights], list[tuple[int, ...]]]:
    """Resume from the save, in a fresh engine or in one with an open (or failed) window."""
    engine = make_engine(config, optimizer=OPTIMIZERS[kind])
    if into != "fresh":
        run_window(engine, [B, B], scale_wrt_gas=False)
        for micro_batch in OPEN:
            engine.backward(forward(engine, micro_batch), scale_wrt_gas=False)
    if into == "failed":
        with broken_backward(engine), pytest.raises(ZeroDivisionError):
            engine.backward(forward(engine, AB))
    path, _ = engine.load_checkpoint(folder, tag=tag)
    assert path is not None
    counters = [(engine.global_steps, engine.global_samples)]
    history = run_windows(engine, AFTER)
    counters.append((engine.global_steps, engine.global_samples))
    engine.destroy()
    return history, counters


def samples(windows: Any) -> int:
    return 4 * sum(len(window) for window in windows)


@pytest.mark.parametrize(("stage", "offload"), MODES)
@pytest.mark.parametrize(("dtype", "accum_dtype"), [("fp32", None), ("bf16", "fp32")])
def test_save_in_an_open_window_and_resume(
    ranks: RankPool,
    tmp_path: Path,
    stage: int,
    offload: bool,
    dtype: str,
    accum_dtype: str | None,
) -> None:
    config = mode_config(stage, offload, dtype=dtype, accum_dtype=accum_dtype)
    uninterrupted = same_on_all_ranks([*BEFORE, OPEN, *AFTER])
    for history, counters, warnings in ranks.run(
        train_and_save, config=config, folder=str(tmp_path)
    ):
        assert history == reference(uninterrupted, make_optimizer=momentum)
        assert counters == (6, samples(uninterrupted[0]))
        assert warnings == 1
    if uses_fp16_optimizer(stage, dtype, accum_dtype):
        return
    # As if the open window had never been.
    resumed = reference(same_on_all_ranks([*BEFORE, *AFTER]), make_optimizer=momentum)
    for into in ("fresh", "open", "failed"):
        for history, counters in ranks.run(
            load_and_train, config=config, folder=str(tmp_path), into=into
        ):
            assert history == resumed[len(BEFORE) :]
            assert counters == [(2, samples(BEFORE)), (5, samples([*BEFORE, *AFTER]))]


def stock_load_in_an_open_window(config: dict[str, Any], folder: str) -> list[Weights]:
    engine = make_engine(config, optimizer=momentum)
    engine.save_checkpoint(folder, tag="start")
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(forward(engine, AB) * 1.0, scale_wrt_gas=False)
    engine.load_checkpoint(folder, tag="start")
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(forward(engine, A) * 1.0, scale_wrt_gas=False)
    engine.step()
    history = [full_weights(engine)]
    engine.destroy()
    return history


def test_control_stock_applies_the_open_window_to_the_loaded_weights(
    ranks: RankPool, tmp_path: Path
) -> None:
    config = make_config(stage=1, unmanaged=False)
    expected = reference(same_on_all_ranks([[A]]), make_optimizer=momentum)
    for history in ranks.run(
        stock_load_in_an_open_window, plugin=False, config=config, folder=str(tmp_path)
    ):
        assert history != expected


def stock_resume(config: dict[str, Any], folder: str | None) -> list[Weights]:
    """Without a folder, go on without a checkpoint."""
    engine = make_engine(config, optimizer=momentum)
    for micro_batch in (AB, A):
        engine.backward(forward(engine, micro_batch))
        engine.step()
    if folder:
        engine.save_checkpoint(folder, tag="stock")
        engine.destroy()
        engine = make_engine(config, optimizer=momentum)
        engine.load_checkpoint(folder, tag="stock")
    engine.backward(forward(engine, B))
    engine.step()
    history = [full_weights(engine)]
    engine.destroy()
    return history


@pytest.mark.parametrize("stage", [0, 1])
def test_control_stock_cannot_resume_bf16_summed_in_fp32(
    ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    config = make_config(stage=stage, dtype="bf16", accum_dtype="fp32", unmanaged=False)
    # Not plain PyTorch: on 0.18.5-0.18.9 stock is wrong without a checkpoint too, as another
    # control shows.
    expected = ranks.run(stock_resume, plugin=False, config=config, folder=None)
    resumes = False
    with contextlib.suppress(RanksFailed):
        histories = ranks.run(stock_resume, plugin=False, config=config, folder=str(tmp_path))
        resumes = histories == expected
    assert resumes == (not uses_fp16_optimizer(stage, "bf16", "fp32"))


def train_and_save_once(config: dict[str, Any], folder: str) -> list[Weights]:
    """BEFORE, a save in an open window that is dropped, AFTER."""
    engine = make_engine(config, optimizer=adam)
    for window in BEFORE:
        run_window(engine, window, scale_wrt_gas=False)
    engine.backward(forward(engine, OPEN[0]), scale_wrt_gas=False)
    engine.save_checkpoint(folder, tag="open")
    engine.zero_grad()
    history = run_windows(engine, AFTER)
    engine.destroy()
    return history


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resume_from_a_universal_checkpoint(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    """The converter of DeepSpeed knows Adam only. Its roundings are the same in both runs."""
    config = make_config(stage=stage)
    uninterrupted = ranks.run(train_and_save_once, config=config, folder=str(tmp_path))
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", f"{tmp_path}/open", "--output_folder", f"{tmp_path}/universal"]
    command += ["--inject_missing_state"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (tmp_path / "latest_universal").write_text("universal")
    config["checkpoint"] = {"load_universal": True}
    resumed = ranks.run(
        load_and_train,
        config=config,
        folder=str(tmp_path),
        into="open",
        tag="universal",
        kind="adam",
    )
    for (history, counters), expected in zip(resumed, uninterrupted):
        assert history == expected
        assert counters[0] == (2, samples(BEFORE))
