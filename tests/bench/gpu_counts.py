"""Counts what a window asks of a GPU, here and in managed mode: `nox -s gpu_counts`.

On the accelerator double, in one run: waits of the host, copies between host and device and their
bytes, and kernels, of one window after a few that warm up. Prints a row per configuration, and ends
with 1 if this package asks for more in one of them without a reason that is said there.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.double import RECORD, FusedSGD, finish
from harness.model import Layers
from harness.pool import RankPool, RanksFailed, configure_environment
from harness.releases import DEEPSPEED, between
from harness.training import make_config, make_engine

WARM_UP = 3
"""Windows; DeepSpeed's throughput timer waits for the device from the third on."""

NUM_BACKWARDS = (1, 4)
DTYPES = ("fp32", "bf16", "bf16-fp32", "fp16")

Cell = tuple[int, str | None, str, bool, str, int]
"""Stage, what is offloaded, dtype, overlap_comm, reduction, number of backwards."""


def reason_for_more(cell: Cell, more: list[str]) -> str | None:
    """Why a cell may be above managed mode in these counts, if it may."""
    stage, offload, dtype, _, reduction, number = cell
    if more == ["kernels"] and number == 1:
        if (dtype, reduction) == ("bf16-fp32", "step"):
            return "with reduction at step() whole gradients are converted, not a partition"
        if (stage, dtype) == (0, "fp32"):
            return "one kernel, for the gradient norm that stock does not report"
        if (stage, dtype) == (1, "bf16-fp32") and between("0.15.0", "0.19.7"):
            return "a few, for windows of zeros, on which stock step() fails"
    if stage == 2 and offload == "optimizer" and number > 1 and between("0.15.0", "0.18.9"):
        return "stock loses micro-batches here, and their copies"
    return None


def cells() -> Iterator[Cell]:
    for dtype, number in itertools.product(DTYPES, NUM_BACKWARDS):
        yield 0, None, dtype, False, "backward", number
    for stage, dtype, overlaps, number in itertools.product(
        (1, 2, 3), DTYPES, (False, True), NUM_BACKWARDS
    ):
        for offload in (None, "optimizer", "param") if stage == 3 else (None, "optimizer"):
            for reduction in ("backward",) if stage == 1 else ("backward", "step"):
                yield stage, offload, dtype, overlaps, reduction, number


def config_of(cell: Cell, *, unmanaged: bool) -> dict[str, Any]:
    stage, offload, dtype, overlaps, reduction, number = cell
    zero: dict[str, Any] = {"reduce_bucket_size": 1000}
    if stage > 0:
        zero["overlap_comm"] = overlaps
    for part in {"optimizer": ["optimizer"], "param": ["optimizer", "param"]}.get(
        offload or "", []
    ):
        zero[f"offload_{part}"] = {"device": "cpu", "pin_memory": True}
    dtype, *sums = dtype.split("-")
    block = {"unmanaged_gradient_accumulation": {"reduction": reduction}} if unmanaged else {}
    config = make_config(
        stage=stage,
        dtype=dtype,
        accum_dtype=sums[0] if sums else None,
        gas=1 if unmanaged else number,
        unmanaged=unmanaged,
        zero=zero,
        zero_force_ds_cpu_optimizer=False,
        **block,
    )
    if dtype == "fp16":  # with a static scale FP16_Optimizer fails up to 0.16.4
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 4}
    return config


def count(config: dict[str, Any], number: int, num_layers: int, size: int) -> dict[str, Any]:
    """Counts of one window."""
    is_managed = "managed_gradient_accumulation" not in config
    engine = make_engine(config, model=Layers(num_layers, size), optimizer=_optimizer(config))
    batch = engine.module.batch().to(engine.device, next(engine.module.parameters()).dtype)
    for _ in range(WARM_UP):
        _window(engine, batch, number, is_managed)
    finish()
    RECORD.reset()
    _window(engine, batch, number, is_managed)
    record = RECORD.as_dict()
    engine.destroy()
    waits = record["waits"]
    return {
        "device waits": waits.get("device", 0) + waits.get("stream", 0),
        "event waits": waits.get("event", 0),
        "item waits": waits.get("item", 0),
        "copy waits": waits.get("copy", 0),
        "to host": record["copies"].get("to the host", 0),
        "to device": record["copies"].get("to the device", 0),
        "bytes": record["bytes"].get("to the host", 0) + record["bytes"].get("to the device", 0),
        "kernels": record["kernels"] + record["copies"].get("device to device", 0),
    }


def _optimizer(config: dict[str, Any]) -> Any:
    is_fused = config["zero_optimization"]["stage"] == 0 and ("bf16" in config or "fp16" in config)
    kind = FusedSGD if is_fused else torch.optim.SGD
    return lambda parameters: kind(parameters, lr=0.125)


def _window(engine: Any, batch: torch.Tensor, number: int, is_managed: bool) -> None:
    for _ in range(number):
        engine.backward(engine(batch))
        if is_managed:
            engine.step()
    if not is_managed:
        engine.step()


def compare(pool: RankPool, cell: Cell, num_layers: int, size: int) -> tuple[Any, Any]:
    """Counts of rank 0 here and in managed mode."""
    kind: dict[str, Any] = {"number": cell[-1], "num_layers": num_layers, "size": size}
    ours = pool.run(count, config=config_of(cell, unmanaged=True), **kind)[0]
    managed = pool.run(count, plugin=False, config=config_of(cell, unmanaged=False), **kind)[0]
    return ours, managed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--only", default="", help="a part of a row's name")
    options = parser.parse_args()
    configure_environment()
    pool = RankPool(world_size=2, on_double=True)
    num_cells, worse = 0, []
    print(f"deepspeed {DEEPSPEED}, {options.layers} parameters; per window: here / managed")
    for cell in cells():
        stage, offload, dtype, overlaps, reduction, number = cell
        name = f"stage {stage}, {offload or 'no'} offload, {dtype}, overlap {overlaps}, "
        name += f"{reduction}, {number} backwards"
        if options.only not in name:
            continue
        try:
            ours, managed = compare(pool, cell, options.layers, options.size)
        except pytest.skip.Exception as reason:
            print(f"{name}: {reason}", flush=True)
            continue
        except RanksFailed as error:
            print(f"{name}: FAILED\n{error}", flush=True)
            worse.append(name)
            continue
        more = [k for k in ours if ours[k] > managed[k]]
        num_cells += 1
        figures = [
            f"{k} {ours[k]}/{managed[k]}{' MORE' if k in more else ''}"
            for k in ours
            if ours[k] or managed[k]
        ]
        reason = reason_for_more(cell, more)
        print(f"{name}: {', '.join(figures)}{f' ({reason})' if reason else ''}", flush=True)
        if more and reason is None:
            worse.append(name)
    pool.close()
    print(f"{num_cells} configurations, above managed mode in {len(worse)}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
