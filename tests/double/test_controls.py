"""Without one of the waits that the package makes for a GPU, windows of test_windows.py fail."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness.pool import RankPool
from harness.releases import DEEPSPEED, between

_spec = importlib.util.spec_from_file_location(
    "windows", Path(__file__).with_name("test_windows.py")
)
assert _spec is not None
assert _spec.loader is not None
windows = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(windows)


def without(what: str) -> Any:
    """A patch that takes one thing out of the package."""
    from ds_unmanaged_gas import gradients, offload, stage1_2, stage3

    def nothing(*_: Any) -> None:  # a Mock would keep its arguments alive
        pass

    def divide_on_host(self: Any, divisor: float) -> None:
        for tensor in self.final():
            tensor.div_(divisor)

    return {
        "stage 3: order of streams": lambda: mock.patch.object(stage3, "order", nothing),
        "stage 3: stream of the division": lambda: mock.patch.object(
            stage3.Stage3Gradients, "divide", gradients.Gradients.divide
        ),
        "stage 3: memory of gradients": lambda: mock.patch.object(stage3, "keep_alive", nothing),
        "stages 1 and 2: order of streams": lambda: mock.patch.object(stage1_2, "order", nothing),
        "stage 2: memory of gradients": lambda: mock.patch.object(stage1_2, "keep_alive", nothing),
        "stage 1: division on the device": lambda: mock.patch.multiple(
            stage1_2.Stage1Gradients,
            copy=lambda _self, stock, param, args: stock(param, *args),
            divide=divide_on_host,
        ),
        "host sums: wait": lambda: mock.patch.object(offload.HostSums, "wait_for_copies", nothing),
    }[what]()


def run_without(what: str, **kwargs: Any) -> dict[str, Any]:
    with without(what):
        return windows.run(**kwargs)


CELLS = {
    "stage 3: order of streams": (3, None, "fp32", True, "backward"),
    "stage 3: stream of the division": (3, None, "fp16", True, "backward"),
    "stage 1: division on the device": (1, "optimizer", "fp32", False, "backward"),
    "stages 1 and 2: order of streams": (2, None, "fp32", True, "backward"),
    "host sums: wait": (2, "optimizer", "bf16", False, "backward"),
}


def train_layers(config: dict[str, Any], what: str | None) -> list[str]:
    """Several large parameters of one size: memory of one can be given to another at once. An
    exception, and a window after it. Returns the races."""
    from harness import double
    from harness.model import Layers
    from harness.training import make_engine

    engine = make_engine(config, model=Layers(6, 8))
    batch = engine.module.batch().to(engine.device)
    double.RECORD.reset()
    with without(what) if what else contextlib.nullcontext():
        for _ in range(2):
            engine.backward(engine(batch))
            engine.backward(engine(batch))
            engine.step()
            handle = engine.module.layers[2].weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(engine(batch))
            handle.remove()
            engine.zero_grad()
    double.finish()
    races = list(double.RECORD.races)
    engine.destroy()
    return races


LAYERS = {
    "stage 3: memory of gradients": (3, "optimizer", "fp32", True, "backward"),
    "stage 2: memory of gradients": (2, "optimizer", "fp32", True, "backward"),
}


@pytest.mark.parametrize("what", LAYERS)
def test_without_it_large_parameters_race(gpu_ranks: RankPool, what: str) -> None:
    if what.startswith("stage 2") and between("0.17.2"):
        pytest.skip(f"DeepSpeed {DEEPSPEED} lets these gradients live long enough itself")
    config = windows.cell_config(*LAYERS[what], timers={"throughput": {"enabled": False}})

    def ours(without: str | None) -> list[bool]:
        """Whether a race has to do with the package: stock code has its own up to 0.18.4."""
        reports = gpu_ranks.run(train_layers, config=config, what=without)
        return [any("OURS" in race for race in races) for races in reports]

    assert ours(None) == [False, False]
    assert ours(what) == [True, True]


@pytest.mark.parametrize("what", CELLS)
def test_without_it_windows_are_wrong_or_race(gpu_ranks: RankPool, what: str) -> None:
    if what.startswith("stages 1 and 2") and between("0.17.2"):
        pytest.skip(f"DeepSpeed {DEEPSPEED} gives a freed bucket's memory to none of these windows")
    cell = CELLS[what]
    timers = {"throughput": {"enabled": False}}
    config = windows.cell_config(*cell, timers=timers)
    script = windows.SCRIPT + (windows.OVERFLOW if cell[2] == "fp16" else [])
    reports = gpu_ranks.run(run_without, what=what, config=config, script=script)
    of_stock = windows.races_of_stock(gpu_ranks, config)
    races = [set(report["races"]) - of_stock for report in reports]
    assert any(races)
