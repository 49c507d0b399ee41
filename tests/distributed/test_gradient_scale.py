"""The ``unmanaged_gradient_accumulation`` block: what a window's sum is divided by, and when.

The reference is plain PyTorch on the sum of all losses of all ranks, divided once. Sums are exact,
and dividing by a number or by its half after halving rounds alike: ``==`` throughout.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from harness.model import LEARNING_RATE, Heads, Weights, tensors, weights_of
from harness.pool import RankPool
from harness.releases import skip_without_torch_style, uses_fp16_optimizer
from harness.training import (
    MODES,
    forward,
    full_weights,
    make_config,
    make_engine,
    mode_config,
    run_window,
)

# Per rank and window: the micro-batches, each with its number of items. Unequal on the ranks and
# within a window, a micro-batch without items, a window of one, another head absent.
ITEMS = (
    [
        [({"a": 1, "b": 1}, 3), ({"a": 2, "b": 2}, 5)],
        [({"a": 3, "b": 3}, 7)],
        [({"a": 4}, 1), ({}, 0), ({"a": 5}, 2.5)],
    ],
    [
        [({"a": 1, "b": 1}, 6), ({}, 0)],
        [({}, 0)],
        [({"a": 4}, 4), ({"a": 6, "b": 6}, 3), ({"a": 7}, 1)],
    ],
)
# The same for stages 0 and 1 only, whose ranks may differ in the number of backwards.
UNEVEN = (
    [ITEMS[0][0], ITEMS[0][1], [({"b": 8}, 2)]],
    [ITEMS[1][0] + [({"b": 9}, 1)], [], [({"a": 4}, 3), ({"a": 5}, 4)]],
)


def summed_reference(
    plan: Any, divide: Any, *, clip: float = 0.0
) -> tuple[list[Weights], list[float]]:
    """Plain PyTorch over all ranks: weights and gradient norm after each window.
    ``divide(window of each rank)`` is what the sum of all gradients is divided by."""
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    history, norms = [], []
    for windows in zip(*plan, strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for rank, window in enumerate(windows):
            for micro_batch, _ in window:
                if micro_batch:
                    model(tensors(micro_batch, rank, torch.float32)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= divide(windows)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        norms.append(float(norm))
        optimizer.step()
        history.append(weights_of(model))
    return history, norms


def all_items(windows: Any) -> float:
    return float(sum(items for window in windows for _, items in window))


def all_backwards(windows: Any) -> float:
    return float(sum(len(window) for window in windows))


def world_size(windows: Any) -> float:
    return float(len(windows))


def scaled_config(mode: str, *, offload: bool, gas: int = 4, **options: Any) -> dict[str, Any]:
    block = {"gradient_scale": mode}
    return mode_config(offload=offload, gas=gas, unmanaged_gradient_accumulation=block, **options)


def run_plan(
    plan: Any, config: dict[str, Any], style: str = "items", step: dict[str, Any] | None = None
) -> dict[str, Any]:
    import deepspeed

    from ds_unmanaged_gas import accumulation

    engine = make_engine(config)
    window_of = accumulation(engine)
    report: dict[str, Any] = {"weights": [], "norms": [], "items": []}
    for window in plan[deepspeed.comm.get_rank()]:
        for micro_batch, items in window:
            loss = forward(engine, micro_batch)
            if style == "items":
                window_of.backward(loss, num_items=items)
            elif style == "engine":
                engine.backward(loss)
            else:
                loss.backward()
        assert window_of.num_backwards == len(window)
        report["items"].append(window_of.num_items)
        window_of.step(**(step or {}))
        assert (window_of.num_backwards, window_of.num_items) == (0, 0)
        norm = engine.get_global_grad_norm()
        report["norms"].append(None if norm is None else float(norm))
        report["weights"].append(full_weights(engine))
    engine.destroy()
    return report


def assert_same(ours: list[Weights], theirs: list[Weights], through_bf16: bool) -> None:
    """``==``, unless the quotient was rounded to bf16: by 2**-9 of gradients below 8, in each of
    three updates, times the learning rate."""
    if not through_bf16:
        assert ours == theirs
        return
    for our, their in zip(ours, theirs, strict=True):
        for name, values in their.items():
            difference = (torch.tensor(our[name]) - torch.tensor(values)).abs().max()
            assert difference <= 3 * 8 * 2**-9 * LEARNING_RATE, name


PRECISIONS = [("fp32", None), ("bf16", "fp32")]


@pytest.mark.parametrize(("stage", "offload"), MODES)
@pytest.mark.parametrize(("dtype", "accum_dtype"), PRECISIONS)
def test_division_by_items_of_all_ranks(
    ranks: RankPool, stage: int, offload: bool, dtype: str, accum_dtype: str | None
) -> None:
    config = scaled_config(
        "num_items", offload=offload, stage=stage, dtype=dtype, accum_dtype=accum_dtype
    )
    for plan in (ITEMS, UNEVEN) if stage < 2 else (ITEMS,):
        weights, norms = summed_reference(plan, all_items)
        reports = ranks.run(run_plan, plan=plan, config=config)
        through_bf16 = uses_fp16_optimizer(stage, dtype, accum_dtype)
        for report, windows in zip(reports, plan):
            assert_same(report["weights"], weights, through_bf16)
            # Squares are summed in another order: a few fp32 roundings, or those of bf16.
            assert report["norms"] == pytest.approx(norms, rel=2**-7 if through_bf16 else 1e-6)
            assert report["items"] == [sum(items for _, items in window) for window in windows]


@pytest.mark.parametrize(("stage", "offload"), MODES)
@pytest.mark.parametrize(("dtype", "accum_dtype"), PRECISIONS)
def test_division_by_backwards_of_all_ranks(
    ranks: RankPool, stage: int, offload: bool, dtype: str, accum_dtype: str | None
) -> None:
    config = scaled_config(
        "num_backwards", offload=offload, stage=stage, dtype=dtype, accum_dtype=accum_dtype
    )
    for plan in (ITEMS, UNEVEN) if stage < 2 else (ITEMS,):
        weights, _ = summed_reference(plan, all_backwards)
        for report in ranks.run(run_plan, plan=plan, config=config, style="engine"):
            through_bf16 = uses_fp16_optimizer(stage, dtype, accum_dtype)
            assert_same(report["weights"], weights, through_bf16)


@pytest.mark.parametrize(("stage", "offload"), MODES)
def test_no_division(ranks: RankPool, stage: int, offload: bool) -> None:
    config = scaled_config("none", offload=offload, stage=stage)
    weights, _ = summed_reference(ITEMS, world_size)
    for report in ranks.run(run_plan, plan=ITEMS, config=config, style="engine"):
        assert report["weights"] == weights


@pytest.mark.parametrize("mode", ["none", "num_backwards"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_loss_backward_follows_the_block(ranks: RankPool, stage: int, mode: str) -> None:
    skip_without_torch_style(stage)
    config = scaled_config(mode, offload=False, stage=stage)
    weights, _ = summed_reference(ITEMS, world_size if mode == "none" else all_backwards)
    for report in ranks.run(run_plan, plan=ITEMS, config=config, style="torch"):
        assert report["weights"] == weights


@pytest.mark.parametrize(("stage", "offload"), MODES)
@pytest.mark.parametrize(
    ("dtype", "accum_dtype"), [("fp32", None), ("fp16", "fp16"), ("bf16", "bf16")]
)
def test_norm_and_clip_see_the_divided_gradient(
    ranks: RankPool, stage: int, offload: bool, dtype: str, accum_dtype: str | None
) -> None:
    """A power of two, so that 16-bit gradients stay exact; fp16 has a loss scale of 16."""
    clip, denominator = 0.75, 16
    weights, norms = summed_reference(ITEMS, lambda _: denominator, clip=clip)
    assert max(norms) > clip > min(norms)
    config = scaled_config(
        "num_items", offload=offload, stage=stage, dtype=dtype, accum_dtype=accum_dtype
    )
    step = {"denominator": denominator, "max_grad_norm": clip}
    for report in ranks.run(run_plan, plan=ITEMS, config=config, step=step):
        assert report["norms"] == pytest.approx(norms, rel=1e-6)
        if stage == 0 and dtype == "bf16":
            continue  # no fp32 weights: each update is rounded to bf16
        for ours, theirs in zip(report["weights"], weights):
            for name, values in theirs.items():
                # Stock divides by norm + 1e-6, and rounds the product in its own order.
                torch.testing.assert_close(
                    torch.tensor(ours[name]), torch.tensor(values), rtol=1e-5, atol=1e-5
                )


@pytest.mark.parametrize(("stage", "offload"), MODES)
def test_denominator_divides_the_mean_over_ranks_otherwise(
    ranks: RankPool, stage: int, offload: bool
) -> None:
    weights, _ = summed_reference(ITEMS, lambda windows: 3 * len(windows))
    config = scaled_config("none", offload=offload, stage=stage)
    for report in ranks.run(run_plan, plan=ITEMS, config=config, step={"denominator": 3}):
        assert report["weights"] == weights


def clip_once(config: dict[str, Any]) -> list[Any]:
    """The configured clip, one of this step's own, none, and the configured one again."""
    from ds_unmanaged_gas import accumulation

    engine = make_engine(config)
    window = [{"a": 1, "b": 1}]
    before = torch.tensor(full_weights(engine)["a.weight"])
    moved = []
    for options in ({}, {"max_grad_norm": 0.25}, {"max_grad_norm": float("inf")}, {}):
        for micro_batch in window:
            engine.backward(forward(engine, micro_batch), scale_wrt_gas=False)
        accumulation(engine).step(**options)
        after = torch.tensor(full_weights(engine)["a.weight"])
        moved.append(float((after - before).abs().max()))
        before = after
    engine.destroy()
    return moved


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_max_grad_norm_is_for_one_step(ranks: RankPool, stage: int) -> None:
    config = make_config(stage=stage, dtype="fp32") | {"gradient_clipping": 1.0}
    for clipped, quarter, whole, again in ranks.run(clip_once, config=config):
        assert quarter == pytest.approx(clipped / 4, rel=1e-4)  # norm + 1e-6, and fp32 weights
        assert whole > 2 * clipped
        assert again == pytest.approx(clipped, rel=1e-4)


BAD_CALLS = {
    "num_items negative": ({"num_items": -1}, {}),
    "num_items nan": ({"num_items": float("nan")}, {}),
    "num_items inf": ({"num_items": float("inf")}, {}),
    "num_items of the wrong shape": ({"num_items": torch.ones(2)}, {}),
    "num_items a string": ({"num_items": "3"}, {}),
    "num_items missing": ({}, {}),
    "denominator zero": (None, {"denominator": 0}),
    "denominator negative": (None, {"denominator": -2.0}),
    "denominator nan": (None, {"denominator": float("nan")}),
    "denominator true": (None, {"denominator": True}),
    "max_grad_norm negative": (None, {"max_grad_norm": -1}),
    "max_grad_norm nan": (None, {"max_grad_norm": float("nan")}),
}
BAD_LOSSES = ("not scalar", "no gradient", "no tensor")


def bad_calls(config: dict[str, Any]) -> dict[str, Any]:
    """Each bad call in the middle of a window, which has to survive it."""
    import ds_unmanaged_gas

    engine = make_engine(config)
    window = ds_unmanaged_gas.accumulation(engine)
    said: dict[str, str] = {}

    def note(name: str, action: Any) -> None:
        try:
            action()
            said[name] = "accepted"
        except ds_unmanaged_gas.WindowArgumentError as error:
            said[name] = str(error)

    window.backward(forward(engine, {"a": 1, "b": 1}), num_items=2)
    for name, (backward, step) in BAD_CALLS.items():
        if backward is None:
            note(name, lambda step=step: window.step(**step))
        else:
            loss = forward(engine, {"a": 2, "b": 2})
            note(name, lambda loss=loss, kw=backward: window.backward(loss, **kw))
    output = forward(engine, {"a": 2, "b": 2})
    note("not scalar", lambda: window.backward(output * torch.ones(2), num_items=1))
    note("no gradient", lambda: window.backward(output.detach(), num_items=1))
    note("no tensor", lambda: window.backward(1.0, num_items=1))
    note("num_items missing in engine.backward()", lambda: engine.backward(output))
    window.backward(forward(engine, {"a": 3, "b": 3}), num_items=6)
    window.step()
    weights = [full_weights(engine)]
    window.backward(forward(engine, {"a": 4, "b": 4}), num_items=0)
    note("no items", window.step)
    assert window.state is ds_unmanaged_gas.WindowState.OPEN
    window.discard()
    assert window.state is ds_unmanaged_gas.WindowState.EMPTY
    window.step()  # a window without any backward needs no items
    assert weights == [full_weights(engine)]
    engine.destroy()
    return {"said": said, "weights": weights}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bad_arguments_change_nothing(ranks: RankPool, stage: int) -> None:
    plan = [[[({"a": 1, "b": 1}, 2), ({"a": 3, "b": 3}, 6)]]] * 2
    weights, _ = summed_reference(plan, all_items)
    config = scaled_config("num_items", offload=False, stage=stage)
    for report in ranks.run(bad_calls, config=config):
        said = report["said"]
        assert said.keys() == {
            *BAD_CALLS,
            *BAD_LOSSES,
            "num_items missing in engine.backward()",
            "no items",
        }
        for name, text in said.items():
            assert text != "accepted", name
            setting = name.split()[0]
            assert setting in text or "backward()" in text or "num_items" in text, name
        assert "(2,)" in said["not scalar"]
        assert "accumulation(engine).backward(loss, num_items=...)" in said["num_items missing"]
        assert report["weights"] == weights


def loss_backward_without_items(config: dict[str, Any]) -> str:
    import ds_unmanaged_gas

    engine = make_engine(config)
    with contextlib.suppress(ds_unmanaged_gas.WindowArgumentError):
        forward(engine, {"a": 1, "b": 1}).backward()
        return "accepted"
    state = ds_unmanaged_gas.accumulation(engine).state.name
    engine.zero_grad()
    ds_unmanaged_gas.accumulation(engine).backward(forward(engine, {"a": 1, "b": 1}), num_items=4)
    engine.step()
    engine.destroy()
    return state


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_loss_backward_can_count_no_items(ranks: RankPool, stage: int) -> None:
    skip_without_torch_style(stage)
    config = scaled_config("num_items", offload=False, stage=stage)
    assert ranks.run(loss_backward_without_items, config=config) == ["EMPTY", "EMPTY"]


def accumulation_of(config: dict[str, Any], early: bool) -> str:
    import ds_unmanaged_gas

    if early:
        ds_unmanaged_gas.disable()
    engine = make_engine(config)
    ds_unmanaged_gas.enable()
    said = "accepted"
    try:
        ds_unmanaged_gas.accumulation(engine)
    except ds_unmanaged_gas.UnsupportedConfigError as error:
        said = str(error)
    engine.destroy()
    return said


def test_accumulation_of_an_engine_without_a_window(ranks: RankPool) -> None:
    managed = ranks.run(accumulation_of, config=make_config(stage=1, unmanaged=False), early=False)
    assert all("this engine is managed" in text for text in managed)
    early = ranks.run(accumulation_of, config=make_config(stage=1), early=True)
    assert all("before ds_unmanaged_gas.enable()" in text for text in early)


def window_properties(config: dict[str, Any]) -> list[Any]:
    from ds_unmanaged_gas import accumulation

    engine = make_engine(config)
    window = accumulation(engine)
    seen = [(window.state.name, window.num_backwards, window.num_samples, window.num_items)]
    run_window(engine, [{"a": 1, "b": 1}])
    for items in (3, torch.tensor(2), None):
        window.backward(forward(engine, {"a": 1, "b": 1}), num_items=items)
        seen.append((window.state.name, window.num_backwards, window.num_samples, window.num_items))
    engine.destroy()
    return seen


def test_window_properties(ranks: RankPool) -> None:
    expected = [("EMPTY", 0, 0, 0), ("OPEN", 1, 4, 3), ("OPEN", 2, 8, 5), ("OPEN", 3, 12, 5)]
    assert ranks.run(window_properties, config=make_config(stage=2)) == [expected, expected]
