"""I8: what a window costs, in counts: copies and their bytes, collectives, host buffers.

Compared with stock managed mode with GAS = N and with the native mode on the same release. Counted
on the CPU, where a copy between host and device is a copy like any other. Run with -s for a table.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.counting import Collectives, Copies
from harness.model import Layers
from harness.pool import RankPool
from harness.releases import DEEPSPEED, between
from harness.training import REDUCED_AT_STEP, make_config, make_engine, mode_config
from packaging.version import Version

SIZE = 64
COUNTS = [1, 2, 4, 8]


def run_window(engine: Any, num_backwards: int, *, managed: bool) -> None:
    x = torch.ones(2, SIZE, dtype=next(engine.module.parameters()).dtype, device=engine.device)
    for _ in range(num_backwards):
        engine.backward(engine(x) * 1.0, scale_wrt_gas=False)
        if managed:
            engine.step()
    if not managed:
        engine.step()


def measure(config: dict[str, Any], num_backwards: int) -> dict[str, int]:
    """One window after four warm-up windows."""
    managed = config.get("managed_gradient_accumulation", True)
    engine = make_engine(config, model=Layers(4, SIZE))
    for _ in range(4):
        run_window(engine, num_backwards, managed=managed)
    with Collectives() as collectives, Copies() as copies:
        run_window(engine, num_backwards, managed=managed)
    optimizer = engine.optimizer
    gradients = getattr(optimizer, "_ds_unmanaged_gas", None)
    held = [*getattr(optimizer, "accumulated_grads_in_cpu", {}).values()]
    held += [*getattr(gradients, "_spares", {}).values()]
    report = {
        "copies": copies.number,
        "copied bytes": copies.bytes,
        "collectives": collectives.number,
        "reduced elements": collectives.elements,
        "host buffer bytes": sum(t.numel() * t.element_size() for t in held),
    }
    engine.destroy()
    return report


def measure_modes(
    ranks: RankPool, stage: int, n: int, offload: bool, **options: Any
) -> dict[str, dict[str, int]]:
    """The counts of both ranks together, for the plugin, managed mode and native mode."""
    zero: dict[str, Any] = {"reduce_bucket_size": 3 * SIZE * SIZE}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    modes = {"plugin": (True, True), "managed": (False, False)}
    if Version("0.19.5") <= DEEPSPEED:
        modes["native"] = (False, True)
    results = {}
    for mode, (plugin, unmanaged) in modes.items():
        config = make_config(
            stage=stage,
            gas=n,
            unmanaged=unmanaged,
            zero=zero,
            zero_force_ds_cpu_optimizer=False,
            **options,
        )
        per_rank = ranks.run(measure, plugin=plugin, config=config, num_backwards=n)
        results[mode] = {key: sum(r[key] for r in per_rank) for key in per_rank[0]}
    return results


@pytest.mark.thorough
@pytest.mark.parametrize("offload", [False, True], ids=["no-offload", "offload"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_window_costs_no_more_than_in_stock_modes(
    ranks: RankPool, stage: int, dtype: str, offload: bool
) -> None:
    if stage == 0 and offload:
        pytest.skip("DeepSpeed has no optimizer offload at stage 0")
    accum = None if dtype == "fp32" else "bf16"
    # Stock buckets of this release never count as empty again: once full, they are passed by, and
    # each parameter is reduced alone, without the copies into a bucket.
    without_buckets = stage == 3 and between("0.17.2", "0.17.2")
    for n in COUNTS:
        results = measure_modes(ranks, stage, n, offload, dtype=dtype, accum_dtype=accum)
        ours = results["plugin"]
        cells = [" / ".join(str(counts[key]) for counts in results.values()) for key in ours]
        where = f"stage {stage}{' + offload' if offload else ''}, {dtype}"
        print(f"\n| {DEEPSPEED} | {where} | {n} | " + " | ".join(cells) + " |", end="")
        assert ours["collectives"] > 0
        for mode, counts in results.items():
            for key in ours:
                if without_buckets and mode == "managed" and key in ("copies", "copied bytes"):
                    assert 2 * ours["collectives"] == counts["collectives"]
                else:
                    assert ours[key] <= counts[key], (n, key, mode)


@pytest.mark.parametrize("offload", [False, True], ids=["no-offload", "offload"])
@pytest.mark.parametrize("stage", [2, 3])
def test_reduction_at_step_is_that_of_one_backward(
    ranks: RankPool, stage: int, offload: bool
) -> None:
    zero = {"reduce_bucket_size": 3 * SIZE * SIZE}
    counts = {}
    for name, n, options in (
        ("lone", 1, {}),
        ("backward", 4, {}),
        ("step", 4, REDUCED_AT_STEP),
    ):
        config = mode_config(stage, offload, zero=zero, **options)
        counts[name] = ranks.run(measure, config=config, num_backwards=n)[0]
    for key in ("collectives", "reduced elements"):
        assert counts["step"][key] == counts["lone"][key]
        assert counts["backward"][key] == 4 * counts["lone"][key]


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_lone_backward_with_offload_costs_one_copy_per_partition(
    ranks: RankPool, stage: int, dtype: str
) -> None:
    """The gradient's own copies: those of offload over those of the same window without it would
    mix in the optimizer's, so they are counted where they are made."""
    accum = None if dtype == "fp32" else "bf16"
    zero = {"offload_optimizer": {"device": "cpu"}}
    config = make_config(
        stage=stage, dtype=dtype, accum_dtype=accum, zero=zero, zero_force_ds_cpu_optimizer=False
    )
    for rank in ranks.run(copies_of_lone_backwards, config=config):
        # Four layers on two ranks: stage 2 gives each rank two whole ones, stage 3 half of each.
        owned = 2 if stage == 2 else 4
        assert rank["in backward"] == owned
        assert rank["in finalize"] == 0
        assert rank["spares"] == 0


def copies_of_lone_backwards(config: dict[str, Any]) -> dict[str, int]:
    """Copies into the optimizer's gradient buffers, and by finalize(), in a window of one."""
    engine = make_engine(config, model=Layers(4, SIZE))
    gradients = engine.optimizer._ds_unmanaged_gas
    report = {"in backward": 0, "in finalize": 0}
    sums = gradients._sums
    add, finalize = sums.add, gradients.finalize

    def counting_add(*args: Any) -> Any:
        with Copies() as copies:
            result = add(*args)
        report["in backward"] += copies.number
        return result

    def counting_finalize(divisor: float) -> None:
        with Copies() as copies:
            finalize(divisor)
        report["in finalize"] += copies.number

    for window in range(3):
        if window == 2:  # after warm-up
            sums.add, gradients.finalize = counting_add, counting_finalize
        run_window(engine, 1, managed=False)
    report["spares"] = len(getattr(gradients, "_spares", {}))
    engine.destroy()
    return report
