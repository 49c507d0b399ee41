"""What stock DeepSpeed does without enable(), for each fault that the plugin mends.

Every control states on which releases the fault exists and checks that it does not exist on the
others, so that a test of the plugin next door is known to have something to mend.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness.model import Weights, reference, same_on_all_ranks
from harness.pool import RankPool, RanksFailed
from harness.releases import STAGE2_KEEPS_THE_LAST_ONLY, between
from harness.training import (
    backward_undivided,
    batch_for,
    forward,
    full_weights,
    make_config,
    make_engine,
    train,
    train_managed,
)

# They show what stock code does, which no change of ours changes: `nox -s sweep` runs them on every
# release.
pytestmark = pytest.mark.thorough

AB = ("a", "b")
NATIVE = between("0.19.4")


def windows_of(*windows: list[tuple[str, ...]]) -> list[list[dict[str, int]]]:
    seeds = iter(range(1, 100))
    return [[dict.fromkeys(heads, seed) for heads, seed in zip(w, seeds)] for w in windows]


def is_right(ranks: RankPool, windows: Any, **options: Any) -> bool:
    config = make_config(gas=len(windows[0]), unmanaged=False, **options)
    results = ranks.run(train_managed, plugin=False, windows=windows, config=config)
    return results == [reference(same_on_all_ranks(windows))] * 2


def test_loop_of_the_controls_is_right_where_stock_is(ranks: RankPool) -> None:
    for stage in (0, 1, 2, 3):
        if stage == 2 and STAGE2_KEEPS_THE_LAST_ONLY:
            continue
        assert is_right(ranks, windows_of([AB, AB], [AB, AB]), stage=stage)


def test_stage2_keeps_the_last_backward_only(ranks: RankPool) -> None:
    assert is_right(ranks, windows_of([AB, AB]), stage=2) == (not STAGE2_KEEPS_THE_LAST_ONLY)


def managed_heads_in_turn(config: dict[str, Any]) -> None:
    """A backward that leaves a parameter unused which the recorded order has prefetched."""
    engine = make_engine(config)
    for heads in (AB, AB, AB, ("b",), ("a",)):
        engine.backward(forward(engine, dict.fromkeys(heads, 1)))
        engine.step()
    engine.destroy()


def test_stage3_aborts_if_a_prefetched_parameter_is_not_used(ranks: RankPool) -> None:
    """Not mended here: a clear error of stock code, and the prefetch can be turned off."""
    zero = {"stage3_prefetch_bucket_size": 50_000_000}
    config = make_config(stage=3, unmanaged=False, zero=zero)
    if between("0.15.3"):
        ranks.run(managed_heads_in_turn, plugin=False, config=config)
        return
    with pytest.raises(RanksFailed, match="still have inflight params"):
        ranks.run(managed_heads_in_turn, plugin=False, config=config)


def test_flag_does_nothing_before_the_native_mode(ranks: RankPool) -> None:
    windows = same_on_all_ranks(windows_of([AB], [AB, AB]))
    config = make_config(stage=1, gas=4)
    results = ranks.run(train, plugin=False, windows_by_rank=windows, config=config)
    assert (results == [reference(windows)] * 2) == NATIVE


@pytest.mark.parametrize(
    "windows",
    [windows_of([AB, AB], [("a",), AB]), windows_of([AB, AB], [("a",), ("a",)])],
    ids=["late", "absent"],
)
def test_stage3_keeps_gradients_of_an_earlier_window(ranks: RankPool, windows: Any) -> None:
    assert not is_right(ranks, windows, stage=3)
    assert is_right(ranks, windows, stage=1)


def test_stage3_without_reduce_scatter_reduces_what_an_earlier_backward_left(
    ranks: RankPool,
) -> None:
    windows, zero = windows_of([AB], [AB]), {"reduce_scatter": False}
    assert is_right(ranks, windows, stage=3, zero=zero) == (not between("0.17.2", "0.17.2"))
    assert is_right(ranks, windows, stage=3)


def managed_forwards_first(windows: Any, config: dict[str, Any]) -> list[Weights]:
    engine = make_engine(config)
    history = []
    for window in windows:
        for loss in [forward(engine, micro_batch) for micro_batch in window]:
            backward_undivided(engine, loss)
            engine.step()
        history.append(full_weights(engine))
    engine.destroy()
    return history


def test_stage3_loses_the_first_of_two_backwards_without_a_forward(ranks: RankPool) -> None:
    windows = windows_of([AB, AB], [AB, AB])
    config = make_config(stage=3, gas=2, unmanaged=False)
    results = ranks.run(managed_forwards_first, plugin=False, windows=windows, config=config)
    assert (results != [reference(same_on_all_ranks(windows))] * 2) == between("0.18.5")


def test_fp16_stage0_update_is_too_small_by_the_loss_scale(ranks: RankPool) -> None:
    right = is_right(ranks, windows_of([AB]), stage=0, dtype="fp16")
    assert right == (not between("0.18.3"))
    assert is_right(ranks, windows_of([AB]), stage=1, dtype="fp16", accum_dtype="fp16")


def test_bf16_stage0_gradients_pile_up_and_lack_the_loss_scale(ranks: RankPool) -> None:
    right = is_right(ranks, windows_of([AB], [AB]), stage=0, dtype="bf16", accum_dtype="bf16")
    assert right == between("0.18.6")


def test_stage1_with_another_accumulation_dtype_does_not_average(ranks: RankPool) -> None:
    right = is_right(ranks, windows_of([AB], [AB]), stage=1, dtype="fp16", accum_dtype="fp32")
    assert right == between("0.19.8")


def test_bf16_stage1_does_not_average_the_last_backward(ranks: RankPool) -> None:
    """0.18.3 and 0.18.4, which never use BF16_Optimizer, lose the loss scale as at stage 0."""
    right = is_right(ranks, windows_of([AB], [AB]), stage=1, dtype="bf16", accum_dtype="fp32")
    assert right == (not between("0.18.3", "0.18.9"))


def sum_of_256_and_64_ones(config: dict[str, Any]) -> float:
    import torch

    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(8))

        def forward(self, x: float) -> Any:
            return self.w.sum() * x

    engine = make_engine(config, model=One(), optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    for x in [256.0] + [1.0] * 64:
        backward_undivided(engine, engine(x))
        engine.step()
    weight = float(full_weights(engine)["w"][0])
    engine.destroy()
    return weight


def test_stage2_sums_in_bf16_whatever_was_configured(ranks: RankPool) -> None:
    config = make_config(stage=2, dtype="bf16", accum_dtype="fp32", gas=65, unmanaged=False)
    expected = -320.0 if between("0.19.8") else -256.0
    if STAGE2_KEEPS_THE_LAST_ONLY:
        expected = -1.0
    assert ranks.run(sum_of_256_and_64_ones, plugin=False, config=config) == [expected] * 2


def managed_two_losses(config: dict[str, Any]) -> list[Weights]:
    engine = make_engine(config)
    loss = engine(batch_for(engine, {"a": 1, "b": 1}))
    backward_undivided(engine, loss * 2, retain_graph=True)
    engine.step()
    backward_undivided(engine, loss * -1)
    engine.step()
    weights = [full_weights(engine)]
    engine.destroy()
    return weights


def two_losses_are_right(ranks: RankPool, **options: Any) -> bool:
    config = make_config(gas=2, unmanaged=False, **options)
    try:
        results = ranks.run(managed_two_losses, plugin=False, config=config)
    except RanksFailed:
        return False
    return results == [reference(same_on_all_ranks([[{"a": 1, "b": 1}]]))] * 2


def test_two_losses_on_one_forward(ranks: RankPool) -> None:
    assert two_losses_are_right(ranks, stage=2) == (not STAGE2_KEEPS_THE_LAST_ONLY)
    assert two_losses_are_right(ranks, stage=3) == (not between("0.18.5"))
    right = two_losses_are_right(ranks, stage=1, dtype="bf16", accum_dtype="fp32")
    assert right == (not between("0.18.3"))


def scaled_loss_that_is_the_output(config: dict[str, Any]) -> list[Weights]:
    engine = make_engine(config)
    for _ in range(4):
        engine.backward(forward(engine, {"a": 1, "b": 1}), scale_wrt_gas=False)
        engine.step()
    weights = [full_weights(engine)]
    engine.destroy()
    return weights


def test_scale_wrt_gas_false_is_ignored_for_a_loss_that_is_the_output(ranks: RankPool) -> None:
    config = make_config(stage=0, gas=4, unmanaged=False)
    results = ranks.run(scaled_loss_that_is_the_output, plugin=False, config=config)
    right = results == [reference(same_on_all_ranks([[{"a": 1, "b": 1}] * 4]))] * 2
    assert right == (not (between("0.18.3", "0.18.3") or between("0.19.6")))  # 0.18.3: for any loss


def stage1_ranks_differ(config: dict[str, Any]) -> None:
    import deepspeed

    engine = make_engine(config)
    heads = {"a": 1} if deepspeed.comm.get_rank() else {"a": 1, "b": 1}
    engine.backward(forward(engine, heads))
    engine.step()
    engine.destroy()


def test_stage1_fails_if_ranks_used_different_parameters(ranks: RankPool) -> None:
    config = make_config(stage=1, unmanaged=False)
    with pytest.raises(RanksFailed):
        ranks.run(stage1_ranks_differ, plugin=False, config=config, timeout=20)


def managed_empty_step(config: dict[str, Any], loss_factor: float | None) -> None:
    engine = make_engine(config)
    for factor in (1.0, loss_factor):
        if factor is not None:
            engine.backward(forward(engine, {"a": 1, "b": 1}) * factor)
        engine.step()
    engine.destroy()


@pytest.mark.parametrize(
    "options",
    [{"stage": 1}, {"stage": 2}, {"stage": 3}],
    ids=lambda o: "-".join(str(v) for v in o.values()),
)
def test_step_without_backward_fails(ranks: RankPool, options: dict[str, Any]) -> None:
    config = make_config(unmanaged=False, **options)
    if options["stage"] == 1 and not NATIVE:
        pytest.skip("a managed stage-1 step() reduces nothing before the native mode")
    config["managed_gradient_accumulation"] = not NATIVE
    with pytest.raises(RanksFailed, match=r"IndexError|TypeError|KeyError|None"):
        ranks.run(managed_empty_step, plugin=False, config=config, loss_factor=None)


def test_bf16_stage1_fails_on_a_window_of_zero_gradients(ranks: RankPool) -> None:
    config = make_config(stage=1, dtype="bf16", accum_dtype="fp32", unmanaged=False)
    fails = False
    try:
        ranks.run(managed_empty_step, plugin=False, config=config, loss_factor=0.0)
    except RanksFailed as error:
        fails = "AssertionError" in str(error) and "all_groups_norm" in str(error)
    # DeepSpeed 0.17.6-0.18.4 never use BF16_Optimizer.
    assert fails == (between("0.18.5", "0.19.7") or not between("0.17.6"))


def norm_at_stage0(config: dict[str, Any]) -> Any:
    engine = make_engine(config)
    engine.backward(forward(engine, {"a": 1, "b": 1}))
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return norm


def test_stage0_has_no_gradient_norm(ranks: RankPool) -> None:
    config = make_config(stage=0, unmanaged=False)
    assert ranks.run(norm_at_stage0, plugin=False, config=config) == [None, None]


def native_torch_style(config: dict[str, Any]) -> tuple[list[Weights], int]:
    engine = make_engine(config)
    for loss in [forward(engine, {"a": s, "b": s}) for s in (1, 2)]:
        loss.backward()
    engine.step()
    report = [full_weights(engine)], int(engine.global_samples)
    engine.destroy()
    return report


@pytest.mark.skipif(not NATIVE, reason="this DeepSpeed has no native unmanaged mode")
def test_native_mode_loses_and_miscounts_loss_backward(ranks: RankPool) -> None:
    expected = reference(same_on_all_ranks([[{"a": s, "b": s} for s in (1, 2)]]))
    config = make_config(stage=2)
    for history, samples in ranks.run(native_torch_style, plugin=False, config=config):
        assert samples == 0
        assert history != expected
    with pytest.raises(RanksFailed, match="unknown parameter type"):
        ranks.run(native_torch_style, plugin=False, config=make_config(stage=3))


def stock_accepts_the_string_false(config: dict[str, Any]) -> bool:
    engine = make_engine(config)
    managed_mode = bool(engine.managed_gradient_accumulation())
    engine.destroy()
    return managed_mode


@pytest.mark.skipif(not NATIVE, reason="this DeepSpeed has no native unmanaged mode")
def test_native_mode_takes_the_string_false_for_true(ranks: RankPool) -> None:
    config = make_config(stage=0) | {"managed_gradient_accumulation": "false"}
    assert ranks.run(stock_accepts_the_string_false, plugin=False, config=config) == [True, True]
