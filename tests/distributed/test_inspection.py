"""Gradients, their norm and the optimizer's states, read between the last backward() and step()."""

from __future__ import annotations

import contextlib
from typing import Any

import deepspeed
import pytest
import torch
from harness.model import (
    LEARNING_RATE,
    MIXED_WINDOWS,
    Heads,
    Weights,
    Window,
    reference,
    same_on_all_ranks,
    tensors,
)
from harness.pool import RankPool
from harness.releases import DEEPSPEED, between, skip_without_torch_style, uses_fp16_optimizer
from harness.training import (
    MODES,
    PARTITIONED_MODES,
    REDUCED_AT_STEP,
    broken_backward,
    forward,
    full_weights,
    make_config,
    make_engine,
    mode_config,
    run_window,
)

PRECISIONS = [
    ("fp32", None),
    pytest.param("bf16", "bf16", marks=pytest.mark.thorough),
    ("bf16", "fp32"),
    pytest.param("fp16", "fp16", marks=pytest.mark.thorough),
]

WINDOWS: list[Window] = [*MIXED_WINDOWS]

# Stock code reduces a gradient in place, if it is alone in its bucket and was not copied into it.
IN_PLACE = [
    pytest.param({"reduce_bucket_size": 16}, id="small buckets"),
    pytest.param({"contiguous_gradients": False}, id="apart", marks=pytest.mark.thorough),
]


def gradients_so_far(windows_by_rank: list[Window]) -> dict[str, torch.Tensor]:
    """Plain PyTorch: the mean over ranks of the summed gradients."""
    model = Heads()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for rank, window in enumerate(windows_by_rank):
        for micro_batch in window:
            (model(tensors(micro_batch, rank, torch.float32)) / len(windows_by_rank)).backward()
    return {name: p.grad for name, p in model.named_parameters()}  # type: ignore[misc]


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([g.flatten() for g in gradients.values()]).norm())


def read(
    config: dict[str, Any], windows_by_rank: list[list[Window]], every: bool, style: str = "engine"
) -> dict[str, Any]:
    """Look at the window before its first backward (if ``every``), after each (if ``every``, else
    after the last), and train on."""
    from deepspeed.utils import safe_get_full_grad, safe_get_local_grad

    import ds_unmanaged_gas

    engine = make_engine(config)
    window_of = ds_unmanaged_gas.accumulation(engine)
    # As in managed mode they come with the loss scale, which bf16 has too on some releases.
    scale = float(getattr(engine.optimizer, "loss_scale", 1.0))
    report: dict[str, Any] = {"looks": [], "norms": [], "history": []}

    def look() -> None:
        norm = window_of.grad_norm()
        grads = {
            name: safe_get_full_grad(p).float().div(scale).tolist()
            for name, p in engine.module.named_parameters()
        }
        local = {}
        if engine.zero_optimization_stage() == 3:
            local = {
                name: safe_get_local_grad(p).float().div(scale).tolist()
                for name, p in engine.module.named_parameters()
            }
        report["looks"].append((norm, window_of.grad_norm(), grads, local))

    for window in windows_by_rank[deepspeed.comm.get_rank()]:
        for number, micro_batch in enumerate(window):
            loss = forward(engine, micro_batch)
            if style == "torch":
                loss.backward()
            else:
                engine.backward(loss, scale_wrt_gas=False)
            if every or number == len(window) - 1:
                look()
        before = window_of.grad_norm()
        engine.step()
        report["norms"].append((before, float(engine.get_global_grad_norm())))
        report["history"].append(full_weights(engine))
    engine.destroy()
    return report


def check(reports: list[dict[str, Any]], every: bool, windows: list[Window] = WINDOWS) -> None:
    so_far = [
        gradients_so_far([window[: number + 1]] * 2)
        for window in windows
        for number in range(len(window))
        if every or number == len(window) - 1
    ]
    for rank, report in enumerate(reports):
        assert len(report["looks"]) == len(so_far)
        for (norm, again, grads, local), expected in zip(report["looks"], so_far):
            # Squares are summed in another order: a few fp32 roundings.
            assert norm == pytest.approx(norm_of(expected), rel=1e-6)
            assert again == norm
            assert grads == {name: g.tolist() for name, g in expected.items()}
            for name, part in local.items():
                padded = torch.cat([expected[name].flatten(), torch.zeros(1)])
                assert part == padded[rank * len(part) :][: len(part)].tolist()
        for (before, reported), window in zip(report["norms"], windows):
            expected_norm = norm_of(gradients_so_far([window] * 2))
            assert before == pytest.approx(expected_norm, rel=1e-6)
            assert reported == pytest.approx(before, rel=1e-6)


def check_read_and_left_as_it_is(
    ranks: RankPool, config: dict[str, Any], every: bool = True, style: str = "engine"
) -> None:
    both = same_on_all_ranks(WINDOWS)
    reports = ranks.run(read, config=config, windows_by_rank=both, every=every, style=style)
    check(reports, every)
    # Not a bit differs from a run in which nobody looked.
    for report in reports:
        assert report["history"] == reference(both)


@pytest.mark.parametrize(
    "every",
    [pytest.param(False, id="last", marks=pytest.mark.thorough), pytest.param(True, id="every")],
)
@pytest.mark.parametrize(("stage", "offload"), MODES)
@pytest.mark.parametrize(("dtype", "accum_dtype"), PRECISIONS)
def test_window_is_read_and_left_as_it_is(
    ranks: RankPool, stage: int, offload: bool, dtype: str, accum_dtype: str | None, every: bool
) -> None:
    config = mode_config(stage, offload, dtype=dtype, accum_dtype=accum_dtype)
    check_read_and_left_as_it_is(ranks, config, every=every)


@pytest.mark.parametrize("zero", IN_PLACE)
@pytest.mark.parametrize(("stage", "offload"), MODES)
@pytest.mark.parametrize(("dtype", "accum_dtype"), [PRECISIONS[0], PRECISIONS[2]])
def test_window_that_is_reduced_in_place_is_read(
    ranks: RankPool,
    stage: int,
    offload: bool,
    dtype: str,
    accum_dtype: str | None,
    zero: dict[str, Any],
) -> None:
    config = mode_config(stage, offload, dtype=dtype, accum_dtype=accum_dtype, zero=zero)
    check_read_and_left_as_it_is(ranks, config)


@pytest.mark.parametrize("zero", [pytest.param({}, id="default"), *IN_PLACE])
@pytest.mark.parametrize(("stage", "offload"), PARTITIONED_MODES)
@pytest.mark.parametrize(("dtype", "accum_dtype"), PRECISIONS)
def test_window_that_is_reduced_at_step_is_read(
    ranks: RankPool,
    stage: int,
    offload: bool,
    dtype: str,
    accum_dtype: str | None,
    zero: dict[str, Any],
) -> None:
    config = mode_config(
        stage, offload, dtype=dtype, accum_dtype=accum_dtype, zero=zero, **REDUCED_AT_STEP
    )
    check_read_and_left_as_it_is(ranks, config)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torch_style_window_is_read(ranks: RankPool, stage: int) -> None:
    skip_without_torch_style(stage)
    check_read_and_left_as_it_is(ranks, make_config(stage=stage), style="torch")


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, False), (1, True)])
def test_ranks_may_differ_where_backward_reduces_nothing(
    ranks: RankPool, stage: int, offload: bool
) -> None:
    by_rank: list[list[Window]] = [
        [[{"a": 1, "b": 1}], [{"a": 2}, {"b": 3}]],
        [[{"b": 4}], [{"a": 5, "b": 5}]],
    ]
    config = mode_config(stage, offload)
    for report in ranks.run(read, config=config, windows_by_rank=by_rank, every=False):
        assert report["history"] == reference(by_rank)
        for (norm, _, grads, _), windows in zip(report["looks"], zip(*by_rank)):
            expected = gradients_so_far(list(windows))
            assert norm == pytest.approx(norm_of(expected), rel=1e-6)
            assert grads == {name: g.tolist() for name, g in expected.items()}


def divided_norm(config: dict[str, Any]) -> tuple[float, float]:
    import ds_unmanaged_gas

    engine = make_engine(config)
    window = ds_unmanaged_gas.accumulation(engine)
    for items, micro_batch in zip((3, 5), WINDOWS[0]):
        window.backward(forward(engine, micro_batch), num_items=items)
    before = window.grad_norm()
    window.step()
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return before, norm


@pytest.mark.parametrize(("stage", "offload"), MODES)
def test_norm_is_that_of_the_divided_gradients(ranks: RankPool, stage: int, offload: bool) -> None:
    config = mode_config(stage, offload)
    config["unmanaged_gradient_accumulation"] = {"gradient_scale": "num_items"}
    # Twice 8 items divide the sum over ranks, which is twice the mean.
    expected = norm_of(gradients_so_far([WINDOWS[0][:2]] * 2)) / 8
    for before, norm in ranks.run(divided_norm, config=config):
        assert before == pytest.approx(expected, rel=1e-6)  # as above
        assert norm == pytest.approx(before, rel=1e-6)


def overflow(config: dict[str, Any]) -> dict[str, Any]:
    import ds_unmanaged_gas

    engine = make_engine(config)
    window = ds_unmanaged_gas.accumulation(engine)
    report: dict[str, Any] = {}
    engine.backward(forward(engine, {"a": 1, "b": 1}), scale_wrt_gas=False)
    poison = float("inf") if deepspeed.comm.get_rank() == 0 else 1.0
    engine.backward(forward(engine, {"a": 2, "b": 2}) * poison, scale_wrt_gas=False)
    report["norm"] = window.grad_norm()
    # The overflow has to outlive the look and what comes after it.
    engine.backward(forward(engine, {"a": 3, "b": 3}), scale_wrt_gas=False)
    engine.step()
    report["skipped"] = engine.skipped_steps
    run_window(engine, WINDOWS[0], scale_wrt_gas=False)
    report["weights"] = full_weights(engine)
    engine.destroy()
    return report


@pytest.mark.parametrize(("stage", "offload"), MODES)
def test_norm_of_an_overflow_is_infinite_and_its_step_skipped(
    ranks: RankPool, stage: int, offload: bool
) -> None:
    for report in ranks.run(overflow, config=mode_config(stage, offload, dtype="fp16")):
        assert report["norm"] == float("inf")
        assert report["skipped"] == 1
        assert report["weights"] == reference(same_on_all_ranks([WINDOWS[0]]))[-1]


def states_in_open_window(config: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The fp32 weights and Adam's states after each step, and again with the next window open."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = make_engine(config, optimizer=lambda p: torch.optim.Adam(p, lr=LEARNING_RATE))

    def states() -> dict[str, Any]:
        found = {}
        for name, p in engine.module.named_parameters():
            found[name] = safe_get_full_fp32_param(p).tolist()
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {key}"] = safe_get_full_optimizer_state(p, key).tolist()
        return found

    pairs = []
    run_window(engine, WINDOWS[0], scale_wrt_gas=False)
    for window in (WINDOWS[2], WINDOWS[4]):
        closed = states()
        for micro_batch in window:
            engine.backward(forward(engine, micro_batch), scale_wrt_gas=False)
        pairs.append((closed, states()))
        engine.step()
    engine.destroy()
    return pairs


@pytest.mark.parametrize(("stage", "offload"), [m for m in MODES if m.values[0] != 0])
@pytest.mark.parametrize(("dtype", "accum_dtype"), [("fp32", None), ("bf16", "fp32")])
def test_optimizer_states_are_those_of_the_last_step(
    ranks: RankPool, stage: int, offload: bool, dtype: str, accum_dtype: str | None
) -> None:
    config = mode_config(stage, offload, dtype=dtype, accum_dtype=accum_dtype)
    if not offload and uses_fp16_optimizer(stage, dtype, accum_dtype):
        pytest.skip(f"DeepSpeed {DEEPSPEED} has no accessors for its fp16 optimizer")
    for pairs in ranks.run(states_in_open_window, config=config):
        for closed, in_open_window in pairs:
            assert closed == in_open_window
        assert pairs[0] != pairs[1]


def refusals(config: dict[str, Any]) -> dict[str, str]:
    from deepspeed.utils import safe_get_full_grad

    import ds_unmanaged_gas

    engine = make_engine(config)
    window = ds_unmanaged_gas.accumulation(engine)
    parameter = engine.module.a.weight
    said: dict[str, str] = {}

    def attempt(what: str, action: Any) -> None:
        try:
            action()
            said[what] = "ok"
        except ds_unmanaged_gas.UnmanagedGasError as error:
            said[what] = f"{type(error).__name__}: {error}"

    engine.backward(forward(engine, {"a": 1, "b": 1}), scale_wrt_gas=False)
    if hasattr(deepspeed.utils, "safe_set_full_grad"):
        value = torch.zeros(4, 4)
        attempt("set", lambda: deepspeed.utils.safe_set_full_grad(parameter, value))
        if engine.zero_optimization_stage() == 3:
            part = torch.zeros(8)
            attempt("set local", lambda: deepspeed.utils.safe_set_local_grad(parameter, part))
    with broken_backward(engine), contextlib.suppress(ZeroDivisionError):
        engine.backward(forward(engine, {"a": 1, "b": 1}), scale_wrt_gas=False)
    attempt("norm after failure", window.grad_norm)
    attempt("grad after failure", lambda: safe_get_full_grad(parameter))
    engine.zero_grad()
    said["norm of nothing"] = str(window.grad_norm())
    said["gradient of nothing"] = str(safe_get_full_grad(parameter).unique().tolist())
    engine.destroy()
    return said


@pytest.mark.parametrize(("stage", "offload"), MODES)
def test_what_can_not_be_read_or_set_is_refused(ranks: RankPool, stage: int, offload: bool) -> None:
    for said in ranks.run(refusals, config=mode_config(stage, offload)):
        assert said["norm after failure"].startswith("WindowFailedError")
        assert said["grad after failure"].startswith("WindowFailedError")
        assert said["norm of nothing"] == "0.0"
        assert said["gradient of nothing"] == "[0.0]"
        if stage >= 2 and "set" in said:
            assert said["set"].startswith("BoundaryError")
        if stage == 3 and "set local" in said:
            assert said["set local"].startswith("BoundaryError")


def set_and_step(config: dict[str, Any]) -> Weights:
    engine = make_engine(config)
    engine.backward(forward(engine, {"a": 1, "b": 1}), scale_wrt_gas=False)
    parameter = engine.module.a.weight
    full = deepspeed.utils.safe_get_full_grad(parameter)
    deepspeed.utils.safe_set_full_grad(parameter, full * 2)
    engine.step()
    weights = full_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.skipif(not between("0.15.3"), reason="DeepSpeed has no safe_set_full_grad() yet")
@pytest.mark.parametrize("stage", [0, 1])
def test_set_gradient_is_the_one_that_is_applied(ranks: RankPool, stage: int) -> None:
    gradients = gradients_so_far([[{"a": 1, "b": 1}]] * 2)
    gradients["a.weight"] *= 2
    weights = {
        n: (p - LEARNING_RATE * gradients[n]).tolist() for n, p in Heads().named_parameters()
    }
    assert ranks.run(set_and_step, config=make_config(stage=stage)) == [weights, weights]


def stock_gradients(config: dict[str, Any], windows: list[Window]) -> list[Any]:
    """What stock gives between the last backward and step()."""
    from deepspeed.utils import safe_get_full_grad

    engine = make_engine(config)
    found = []
    for window in windows:
        for micro_batch in window:
            engine.backward(forward(engine, micro_batch) * 1.0, scale_wrt_gas=False)
        found.append(
            {n: safe_get_full_grad(p).tolist() for n, p in engine.module.named_parameters()}
        )
        engine.step()
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_managed_gradients_are_right_at_the_boundary(ranks: RankPool, stage: int) -> None:
    windows: list[Window] = [[{"a": 1, "b": 1}], [{"a": 2, "b": 2}]]
    config = make_config(stage=stage, unmanaged=False)
    expected = [
        {name: g.tolist() for name, g in gradients_so_far([window] * 2).items()}
        for window in windows
    ]
    found = ranks.run(stock_gradients, plugin=False, config=config, windows=windows)
    assert found == [expected, expected]


NATIVE = pytest.mark.skipif(
    not between("0.19.4"), reason="this DeepSpeed has no native unmanaged mode"
)


@NATIVE
def test_control_native_gives_unreduced_gradients_at_stage_1(ranks: RankPool) -> None:
    config = make_config(stage=1)
    found = ranks.run(stock_gradients, plugin=False, config=config, windows=[WINDOWS[0]])
    assert found[0] != found[1]


@NATIVE
def test_control_native_gives_stale_gradients_with_offload(ranks: RankPool) -> None:
    config, windows = mode_config(3, True), [WINDOWS[0], WINDOWS[2]]
    if between("0.19.4", "0.19.4"):
        pytest.skip("DeepSpeed 0.19.4 refuses its own unmanaged mode with offload")
    for _, second in ranks.run(stock_gradients, plugin=False, config=config, windows=windows):
        stale, current = (gradients_so_far([window] * 2) for window in windows)
        assert second == {name: g.tolist() for name, g in stale.items()}
        assert second != {name: g.tolist() for name, g in current.items()}
