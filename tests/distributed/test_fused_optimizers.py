"""FP16_Optimizer, which stage 0 has on a GPU: there "Adam" in the ds_config means FusedAdam.

DeepSpeed takes it for optimizers of that class only, which no CPU can run. So here the class that
it looks for is that of the test's optimizer, and the wrapper around it the real one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from harness.model import LEARNING_RATE, MIXED_WINDOWS, Heads, Weights, Window, reference, tensors
from harness.pool import RankPool
from harness.releases import DEEPSPEED, HAS_TORCH_STYLE, between
from harness.training import (
    backward_undivided,
    forward,
    full_weights,
    make_config,
    make_engine,
    run_window,
)
from torch.utils._python_dispatch import TorchDispatchMode

DYNAMIC = {"enabled": True, "loss_scale": 0, "initial_scale_power": 4, "hysteresis": 1}

KINDS: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": "fp16"},
    "fp16, dynamic scale": {"fp16": DYNAMIC},
    "bf16": {"dtype": "bf16", "accum_dtype": "bf16"},
    "bf16 summed in fp32": {"dtype": "bf16", "accum_dtype": "fp32"},
}

RANKS_DIFFER: Sequence[Window] = [
    [{"a": 11}],
    [{"a": 12, "b": 12}, {"a": 13}],
    [{"b": 14}],
    [{"a": 15, "b": 15}],
    [],
    [{"b": 16}, {"a": 17}, {"b": 18}],
]
"""What rank 1 does while rank 0 does MIXED_WINDOWS: at stage 0 ranks may."""


STANDS_STILL = between("0.17.6", "0.18.1")
"""FP16_Optimizer returns from every fp16 step before the update. See the control."""


def skip_if_it_stands_still(kind: str) -> None:
    if STANDS_STILL and kind.startswith("fp16"):
        pytest.skip(f"DeepSpeed {DEEPSPEED} applies no fp16 update with FP16_Optimizer")


def fused_config(kind: str, **options: Any) -> dict[str, Any]:
    skip_if_it_stands_still(kind)
    return make_config(stage=0, **KINDS[kind], **options)


@contextmanager
def fused_engine(config: dict[str, Any]) -> Iterator[Any]:
    """An engine on SGD that DeepSpeed takes for a fused optimizer."""
    import deepspeed.runtime.engine as stock_engine
    from deepspeed.utils.timer import NoopTimer

    fused, stock_engine.FusedAdam = stock_engine.FusedAdam, torch.optim.SGD
    try:
        engine = make_engine(config)
    finally:
        stock_engine.FusedAdam = fused
    # bf16 summed in fp32 has BF16_Optimizer up to 0.17.5.
    is_bf16 = "bf16" in config and not between("0.17.6")
    name = "BF16_Optimizer" if is_bf16 else "FP16_Optimizer"
    assert type(engine.optimizer).__name__ == name
    if getattr(engine.optimizer, "timers", None) is None:
        # Up to 0.16.x stock passes none on with a static loss scale, and step() calls None.
        engine.optimizer.timers = NoopTimer()
    yield engine
    engine.destroy()


def report_of(engine: Any) -> dict[str, Any]:
    return {
        "weights": full_weights(engine),
        "norm": float(engine.get_global_grad_norm()),
        "skipped": engine.skipped_steps,
    }


def train_fused(
    config: dict[str, Any],
    windows_by_rank: Sequence[Sequence[Window]],
    max_grad_norm: float | None = None,
    items: int | None = None,
) -> list[dict[str, Any]]:
    """What is seen after each window, and before its step(): grad_norm(), the window's state."""
    import deepspeed

    import ds_unmanaged_gas

    reports = []
    with fused_engine(config) as engine:
        window = ds_unmanaged_gas.accumulation(engine)
        for micro_batches in windows_by_rank[deepspeed.comm.get_rank()]:
            for micro_batch in micro_batches:
                window.backward(forward(engine, micro_batch), num_items=items)
            before = window.grad_norm()
            window.step(max_grad_norm=max_grad_norm)
            reports.append(report_of(engine) | {"before": before})
    return reports


def plain(
    windows_by_rank: Sequence[Sequence[Window]],
    clip: Sequence[float] = (math.inf,),
    items: int | None = None,
) -> list[dict[str, Any]]:
    """The same in PyTorch, in fp32, clipped by these norms in turn. With ``items`` per backward:
    the sum of all ranks' gradients over the items of all ranks."""
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    reports = []
    for windows, max_norm in zip(zip(*windows_by_rank, strict=True), itertools.cycle(clip)):
        divisor = items * sum(map(len, windows)) if items else len(windows)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        for rank, window in enumerate(windows):
            for micro_batch in window:
                model(tensors(micro_batch, rank, torch.float32)).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= divisor or 1
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        weights = {name: p.tolist() for name, p in model.named_parameters()}
        reports.append({"weights": weights, "norm": norm})
    return reports


def assert_same(ours: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The weights exactly. Norms: the order in which squares are summed differs."""
    assert [each["weights"] for each in ours] == [each["weights"] for each in expected]
    assert [each["norm"] for each in ours] == pytest.approx(
        [each["norm"] for each in expected], rel=1e-6, abs=0.0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_windows_of_any_length(ranks: RankPool, kind: str) -> None:
    """One, two, three and no backwards, heads that are absent on one rank or on both."""
    windows = [MIXED_WINDOWS, RANKS_DIFFER]
    expected = plain(windows)
    assert [each["weights"] for each in expected] == reference(windows)
    for ours in ranks.run(train_fused, config=fused_config(kind), windows_by_rank=windows):
        assert_same(ours, expected)
        norms = [each["before"] for each in ours]
        assert norms == pytest.approx([each["norm"] for each in ours], rel=1e-6)
        assert {each["skipped"] for each in ours} == {0}


@pytest.mark.parametrize("kind", KINDS)
def test_divided_by_items(ranks: RankPool, kind: str) -> None:
    windows = [[w for w in MIXED_WINDOWS if len(w) in (0, 1, 2)]] * 2  # what divides exactly
    config = fused_config(kind, unmanaged_gradient_accumulation={"gradient_scale": "num_items"})
    expected = plain(windows, items=4)
    for ours in ranks.run(train_fused, config=config, windows_by_rank=windows, items=4):
        assert_same(ours, expected)
        norms = [each["before"] for each in ours]
        assert norms == pytest.approx([each["norm"] for each in ours], rel=1e-6)


def assert_close(ours: Weights, expected: Weights) -> None:
    """Of clipped updates: stock divides by norm + 1e-6."""
    for name, weight in expected.items():
        torch.testing.assert_close(
            torch.tensor(ours[name]), torch.tensor(weight), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_clipping(ranks: RankPool, kind: str, per_step: bool) -> None:
    windows = [MIXED_WINDOWS, RANKS_DIFFER]
    config, options = fused_config(kind), {"max_grad_norm": 2.0} if per_step else {}
    config["gradient_clipping"] = 100.0 if per_step else 2.0
    expected = plain(windows, clip=[2.0])
    for ours in ranks.run(train_fused, config=config, windows_by_rank=windows, **options):
        assert [each["norm"] for each in ours] == pytest.approx(
            [each["norm"] for each in expected], rel=1e-6
        )
        for report, theirs in zip(ours, expected):
            assert_close(report["weights"], theirs["weights"])


def discard_in_mid_window(config: dict[str, Any]) -> list[dict[str, Any]]:
    """After two of three backwards, and after grad_norm(), which must leave nothing behind."""
    import ds_unmanaged_gas

    reports = []
    with fused_engine(config) as engine:
        window = ds_unmanaged_gas.accumulation(engine)
        for micro_batches in MIXED_WINDOWS:
            for seed in (90, 91):
                window.backward(forward(engine, {"a": seed, "b": seed}))
            assert window.grad_norm() > 0
            window.discard()
            run_window(engine, micro_batches, scale_wrt_gas=False)
            reports.append(report_of(engine))
    return reports


@pytest.mark.parametrize("kind", KINDS)
def test_discard_in_mid_window(ranks: RankPool, kind: str) -> None:
    expected = plain([MIXED_WINDOWS] * 2)
    for ours in ranks.run(discard_in_mid_window, config=fused_config(kind)):
        assert_same(ours, expected)


def overflow_between(config: dict[str, Any]) -> dict[str, Any]:
    """A good window, one with an overflow on rank 1 only, a good one."""
    import deepspeed

    import ds_unmanaged_gas

    first, second = [{"a": 1, "b": 1}, {"a": 2}], [{"b": 3}]
    with fused_engine(config) as engine:
        window = ds_unmanaged_gas.accumulation(engine)
        run_window(engine, first, scale_wrt_gas=False)
        good = report_of(engine)
        loss = forward(engine, {"a": 4, "b": 4})
        # The gradients are of fp16, whose largest number is 65504.
        window.backward(loss * 60000.0 if deepspeed.comm.get_rank() == 1 else loss)
        norm = window.grad_norm()
        window.step()
        skipped, scale = report_of(engine), float(engine.optimizer.loss_scale)
        run_window(engine, second, scale_wrt_gas=False)
        last = report_of(engine)
    return {"reports": [good, last], "skipped": skipped, "norm": norm, "scale": scale}


@pytest.mark.parametrize("kind", ["fp16", "fp16, dynamic scale"])
def test_overflow_skips_the_update(ranks: RankPool, kind: str) -> None:
    windows = [[{"a": 1, "b": 1}, {"a": 2}], [{"b": 3}]]
    expected = plain([windows] * 2)
    for ours in ranks.run(overflow_between, config=fused_config(kind)):
        assert_same(ours["reports"], expected)
        assert ours["norm"] == math.inf
        assert ours["skipped"]["weights"] == expected[0]["weights"]
        assert [each["skipped"] for each in ours["reports"]] == [0, 1]
        assert ours["scale"] == (8 if kind != "fp16" else 16)


MANAGED_WINDOWS: Sequence[Window] = [w for w in MIXED_WINDOWS if len(w) == 2]


def train_managed_fused(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The stock loop, GAS 2."""
    reports = []
    with fused_engine(config) as engine:
        for micro_batches in MANAGED_WINDOWS:
            for micro_batch in micro_batches:
                loss = forward(engine, micro_batch)
                if HAS_TORCH_STYLE and "fp16" in config:
                    # From 0.18.3 stock forgets to multiply by what its step() divides by.
                    loss = loss.float() * engine.optimizer.loss_scale
                backward_undivided(engine, loss)
                engine.step()
            reports.append(report_of(engine))
            if between("0.17.6", "0.18.5"):
                # Stock never clears bf16 gradients of stage 0 there.
                engine.zero_grad()
    return reports


@pytest.mark.parametrize("kind", KINDS)
def test_control_managed(ranks: RankPool, kind: str) -> None:
    """What stock does of it, so that the tests above measure the plugin."""
    config = fused_config(kind, gas=2, unmanaged=False)
    expected = plain([MANAGED_WINDOWS] * 2)
    for ours in ranks.run(train_managed_fused, config=config, plugin=False):
        assert_same(ours, expected)


@pytest.mark.skipif(not STANDS_STILL, reason=f"DeepSpeed {DEEPSPEED} updates")
def test_control_managed_fp16_stands_still(ranks: RankPool) -> None:
    config = make_config(stage=0, gas=2, unmanaged=False, dtype="fp16")
    at_first = {name: p.tolist() for name, p in Heads().named_parameters()}
    for ours in ranks.run(train_managed_fused, config=config, plugin=False):
        assert [(each["weights"], each["skipped"]) for each in ours] == [(at_first, 0)] * len(ours)


def grow(config: dict[str, Any], managed: bool) -> list[dict[str, Any]]:
    """Windows of one micro-batch, in some of which the loss scale grows."""
    reports = []
    with fused_engine(config) as engine:
        for seed in range(1, 6):
            loss = forward(engine, {"a": seed, "b": seed})
            if managed and HAS_TORCH_STYLE:
                loss = loss.float() * engine.optimizer.loss_scale
            if managed:
                backward_undivided(engine, loss)
            else:
                engine.backward(loss, scale_wrt_gas=False)
            engine.step()
            reports.append(report_of(engine) | {"scale": float(engine.optimizer.loss_scale)})
    return reports


def test_growing_loss_scale_is_as_in_stock(ranks: RankPool) -> None:
    """Stock moves the scale before it divides by it: the update of that step is half of what it
    should be. The plugin leaves that as it is."""
    skip_if_it_stands_still("fp16")
    options = {"fp16": DYNAMIC | {"loss_scale_window": 2}}
    config = make_config(stage=0, **options)
    managed = make_config(stage=0, unmanaged=False, **options)
    ours = ranks.run(grow, config=config, managed=False)
    assert ours == ranks.run(grow, config=managed, managed=True, plugin=False)
    assert len({each["scale"] for each in ours[0]}) > 1


def clip_without_norms(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Every other window is clipped."""
    import ds_unmanaged_gas

    reports = []
    with closing_engine(config) as engine:
        window = ds_unmanaged_gas.accumulation(engine)
        for i, micro_batches in enumerate(MIXED_WINDOWS):
            for micro_batch in micro_batches:
                window.backward(forward(engine, micro_batch))
            before = window.grad_norm()
            window.step(max_grad_norm=2.0 if i % 2 else None)
            norm = engine.get_global_grad_norm()
            norm = None if norm is None else float(norm)
            reports.append({"before": before, "norm": norm, "weights": full_weights(engine)})
    return reports


@pytest.mark.parametrize("stage", [1, 2])
def test_clip_value_where_stock_takes_no_norm(ranks: RankPool, stage: int) -> None:
    if not between("0.19.7"):
        pytest.skip(f"DeepSpeed {DEEPSPEED} always takes the norm")
    config = make_config(stage=stage, zero={"compute_grad_norm": False})
    expected = plain([MIXED_WINDOWS] * 2, clip=[math.inf, 2.0])
    for ours in ranks.run(clip_without_norms, config=config):
        for i, (report, theirs) in enumerate(zip(ours, expected)):
            assert report["before"] == pytest.approx(theirs["norm"], rel=1e-6)
            assert report["norm"] == (pytest.approx(theirs["norm"], rel=1e-6) if i % 2 else None)
            assert_close(report["weights"], theirs["weights"])


class Reads(TorchDispatchMode):
    """Counts numbers that the host reads of tensors: on a device each is a wait."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads(config: dict[str, Any], fused: bool) -> int:
    """In three windows of one micro-batch."""
    with fused_engine(config) if fused else closing_engine(config) as engine, Reads() as mode:
        for seed in range(1, 4):
            run_window(engine, [{"a": seed, "b": seed}])
    return mode.number


@contextmanager
def closing_engine(config: dict[str, Any]) -> Iterator[Any]:
    engine = make_engine(config)
    yield engine
    engine.destroy()


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}

READ: dict[str, tuple[bool, dict[str, Any]]] = {
    **{kind: (True, {"stage": 0, **options}) for kind, options in KINDS.items()},
    "fp32": (False, {"stage": 0}),
    "fp32, clipped": (False, {"stage": 0, "gradient_clipping": 2.0}),
    "fp16, not fused": (False, {"stage": 0, "dtype": "fp16"}),
    "fp16 autocast": (False, {"stage": 0, **AUTOCAST}),
    "fp16 autocast, clipped": (False, {"stage": 0, **AUTOCAST, "gradient_clipping": 2.0}),
    "stage 1": (False, {"stage": 1, "dtype": "bf16", "accum_dtype": "fp32"}),
}


@pytest.mark.parametrize("case", READ)
def test_step_reads_no_more_of_the_device_than_stock(ranks: RankPool, case: str) -> None:
    fused, options = READ[case]
    if "torch_autocast" in options and not between("0.18.0"):
        pytest.skip(f"DeepSpeed {DEEPSPEED} has no loss scale with torch_autocast at stage 0")
    skip_if_it_stands_still(case if fused else "")
    unmanaged, managed = make_config(**options), make_config(unmanaged=False, **options)
    ours = ranks.run(reads, config=unmanaged, fused=fused)
    stock = ranks.run(reads, config=managed, fused=fused, plugin=False)
    assert max(ours) <= min(stock)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(None, 1.0), (16, 16.0), (0.25, 0.25), (numpy.float32(8), 8.0), (torch.tensor(2.0), 2.0)],
)
def test_scale_of_whatever_an_optimizer_says(scale: Any, expected: float) -> None:
    from ds_unmanaged_gas.gradients import scale_of

    found = scale_of(SimpleNamespace(loss_scale=scale))
    assert (type(found), found) == (float, expected)
