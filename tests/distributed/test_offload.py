"""Offloaded optimizers: the same windows, the same numbers, whatever the host buffers held before.

The reference is plain PyTorch; managed mode loses micro-batches up to 0.18.9, and keeps gradients
of earlier windows on every release.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.model import (
    LEARNING_RATE,
    Heads,
    MicroBatch,
    Weights,
    reference,
    same_on_all_ranks,
)
from harness.pool import RankPool, RanksFailed
from harness.releases import between
from harness.training import (
    forward,
    full_weights,
    make_config,
    make_engine,
    mode_config,
    offload_config,
    run_window,
    run_windows,
    train,
    train_managed,
)
from torch.utils.checkpoint import checkpoint

AB, A, B, ZERO = ("a", "b"), ("a",), ("b",), ()

PRECISIONS = [
    pytest.param("fp32", None, id="fp32"),
    pytest.param("bf16", "bf16", id="bf16"),
    pytest.param("bf16", "fp32", id="bf16-fp32"),
]


def windows_of(*windows: list[tuple[str, ...]]) -> list[list[MicroBatch]]:
    seeds = iter(range(1, 1000))
    return [[dict.fromkeys(heads, seed) for heads, seed in zip(w, seeds)] for w in windows]


# What a client's requests amount to between two steps, window by window.
REQUESTS = windows_of(
    [AB, AB, AB],  # one request of several calls
    [ZERO, AB, AB],  # a request with a zero loss, then useful work
    [AB],  # single-call requests in a row
    [AB],
    [AB, AB, AB, AB],  # requests of mixed length
    [AB, AB, AB],  # a one-call request, then one of several backwards before the step
    [AB],  # a fresh single backward after all of these
    [A, AB, B],  # each head absent from the first backward, after it took part in the last update
    [B, A, AB],
)


class Checkpointed(Heads):
    reentrant = True

    def forward(self, batch: Any) -> torch.Tensor:
        # Reentrant checkpoints need an input that requires grad.
        gate = torch.ones((), requires_grad=True)
        losses = [
            checkpoint(self._loss, name, x, t, gate, use_reentrant=self.reentrant)
            for name, (x, t) in batch.items()
        ]
        return torch.stack(losses).sum()

    def _loss(
        self, name: str, x: torch.Tensor, t: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        return (getattr(self, name)(x) * t).sum() * gate.to(x.dtype)


class NonReentrant(Checkpointed):
    reentrant = False


class Frozen(Heads):
    """A frozen head beside the others, and a frozen bias inside one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(4, 4)
        self.frozen.requires_grad_(False)


class ZeroSized(Heads):
    """A trainable parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = torch.nn.Parameter(torch.zeros(0))

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) + self.empty.sum()


MODELS = {"plain": Heads, "reentrant": Checkpointed, "non-reentrant": NonReentrant}
ODD_MODELS = {"frozen": Frozen, "zero-sized": ZeroSized}


def train_model(model: str, windows: Any, config: dict[str, Any]) -> list[Weights]:
    engine = make_engine(config, model=(MODELS | ODD_MODELS)[model]())
    history = run_windows(engine, windows)
    engine.destroy()
    return history


@pytest.mark.thorough
@pytest.mark.parametrize("offload", [True, False], ids=["offload", "no-offload"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "accum_dtype"), PRECISIONS)
def test_requests(
    ranks: RankPool, stage: int, model: str, dtype: str, accum_dtype: str | None, offload: bool
) -> None:
    make = offload_config if offload else make_config
    config = make(stage=stage, dtype=dtype, accum_dtype=accum_dtype)
    expected = reference(same_on_all_ranks(REQUESTS))
    for history in ranks.run(train_model, model=model, windows=REQUESTS, config=config):
        assert history == expected


@pytest.mark.parametrize("offload", [True, False], ids=["offload", "no-offload"])
@pytest.mark.parametrize("model", ODD_MODELS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_and_zero_sized_parameters(
    ranks: RankPool, stage: int, model: str, offload: bool
) -> None:
    if model == "zero-sized" and stage == 3:
        pytest.skip("DeepSpeed's ZeRO-3 can't gather a parameter without elements")
    if model == "zero-sized" and stage == 1 and offload and not between("0.19.6"):
        pytest.skip("stock's overflow check takes the maximum of no elements here, managed too")
    config = mode_config(stage, offload)
    expected = reference(same_on_all_ranks(REQUESTS))
    for history in ranks.run(train_model, model=model, windows=REQUESTS, config=config):
        trained = [{n: w for n, w in weights.items() if n[0] in "ab"} for weights in history]
        assert trained == expected


def test_round_robin_gradients(ranks: RankPool) -> None:
    for stage in (1, 2):
        config = offload_config(stage, zero={"round_robin_gradients": True})
        expected = reference(same_on_all_ranks(REQUESTS))
        for history in ranks.run(train_model, model="plain", windows=REQUESTS, config=config):
            assert history == expected


ABSENCE = windows_of([AB, AB], [A, A], [B], [AB], [A], [], [B, B], [ZERO])

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "configured GAS of 4": {"gas": 4},
    "overlap_comm": {"zero": {"overlap_comm": True}},
    "not pinned": {"zero": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}},
    "bucket smaller than a parameter": {"zero": {"reduce_bucket_size": 8}},
    "one sub group per parameter": {"zero": {"sub_group_size": 1}},
    "persistent parameters": {"zero": {"stage3_param_persistence_threshold": 100000}},
    "no reduce_scatter": {"zero": {"reduce_scatter": False}},
}


@pytest.mark.thorough
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "accum_dtype"),
    [*PRECISIONS, pytest.param("fp16", "fp16", id="fp16"), ("fp16", "fp32")],
)
def test_absent_parameters(
    ranks: RankPool, stage: int, option: str, dtype: str, accum_dtype: str | None
) -> None:
    """Two ranks own halves of one flat group, so a parameter straddles them at stages 1 and 2."""
    windows = same_on_all_ranks([*ABSENCE, *REQUESTS])
    config = offload_config(stage, dtype=dtype, accum_dtype=accum_dtype, **OPTIONS[option])
    for history in ranks.run(train, windows_by_rank=windows, config=config):
        assert history == reference(windows)


@pytest.mark.parametrize(("dtype", "accum_dtype"), PRECISIONS)
def test_parameter_offload(ranks: RankPool, dtype: str, accum_dtype: str | None) -> None:
    windows = same_on_all_ranks([*ABSENCE, *REQUESTS])
    config = offload_config(3, param=True, dtype=dtype, accum_dtype=accum_dtype)
    only_param = make_config(stage=3, dtype=dtype, accum_dtype=accum_dtype)
    only_param["zero_optimization"]["offload_param"] = {"device": "cpu"}
    for each in (config, only_param):
        for history in ranks.run(train, windows_by_rank=windows, config=each):
            assert history == reference(windows)


@pytest.mark.parametrize("case", ["differ", "empty"])
@pytest.mark.parametrize(("dtype", "accum_dtype"), PRECISIONS)
def test_stage1_ranks_may_differ(
    ranks: RankPool, dtype: str, accum_dtype: str | None, case: str
) -> None:
    one = windows_of([AB, A], [A], [AB, AB], [B])
    other = windows_of([A, AB], [B], [AB], [AB, B, A]) if case == "differ" else [[]] * 4
    config = offload_config(1, dtype=dtype, accum_dtype=accum_dtype)
    for history in ranks.run(train, windows_by_rank=[one, other], config=config):
        assert history == reference([one, other])


@pytest.mark.parametrize("stage", [2, 3])
def test_forwards_before_backwards(ranks: RankPool, stage: int) -> None:
    windows = windows_of([AB, AB], [AB, A, B])
    for history in ranks.run(
        forwards_first, windows=windows, config=offload_config(stage, dtype="bf16")
    ):
        assert history == reference(same_on_all_ranks(windows))


def forwards_first(windows: Any, config: dict[str, Any]) -> list[Weights]:
    engine = make_engine(config)
    history = []
    for window in windows:
        for loss in [forward(engine, micro_batch) for micro_batch in window]:
            engine.backward(loss, scale_wrt_gas=False)
        engine.step()
        history.append(full_weights(engine))
    engine.destroy()
    return history


@pytest.mark.builds_op("CPUAdamBuilder")
def test_low_precision_masters_share_the_gradient_buffer(ranks: RankPool) -> None:
    """bf16 masters: weights are exact in bf16 here while they stay below 16."""
    for stage in (2, 3):
        windows = windows_of([AB], [A, AB], [B], [AB])
        config = offload_config(stage, dtype="bf16", accum_dtype="bf16")
        config["bf16"]["bf16_master_weights_and_grads"] = True
        for rank in ranks.run(train_low_precision_masters, windows=windows, config=config):
            assert rank["buffers"] == 0
            assert rank["dtypes"] == ["torch.bfloat16"]
            # DeepSpeedCPUAdam is the only optimizer that DeepSpeed allows for it: compare with
            # itself, fed by a window of one backward of the summed loss.
            assert rank["weights"] == rank["alone"]


def train_low_precision_masters(windows: Any, config: dict[str, Any]) -> dict[str, Any]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    report: dict[str, Any] = {}
    for name in ("weights", "alone"):
        engine = make_engine(
            config,
            optimizer=lambda p: DeepSpeedCPUAdam(p, lr=LEARNING_RATE, fp32_optimizer_states=True),
        )
        history = []
        for window in windows:
            losses = [forward(engine, micro_batch) for micro_batch in window]
            for loss in losses if name == "weights" else [sum(losses)]:
                engine.backward(loss, scale_wrt_gas=False)
            engine.step()
            history.append(full_weights(engine))
        report[name] = history
        gradients = engine.optimizer._ds_unmanaged_gas
        report["buffers"] = len(getattr(gradients, "_spares", {}))
        groups = engine.optimizer.optimizer.param_groups
        report["dtypes"] = sorted({str(p.dtype) for g in groups for p in g["params"]}) or [
            str(engine.optimizer.fp32_partitioned_groups_flat[0].dtype)
        ]
        engine.destroy()
    return report


def overflow_windows(config: dict[str, Any], bad: int) -> dict[str, Any]:
    """Four windows; one micro-batch of the second is infinite in head b, which is absent after."""
    engine = make_engine(config)
    report: dict[str, Any] = {"weights": [], "applied": []}
    for number, window in enumerate(OVERFLOW):
        for micro, micro_batch in enumerate(window):
            loss = forward(engine, micro_batch)
            if number == 1 and micro == bad:
                loss = loss * float("inf")
            engine.backward(loss, scale_wrt_gas=False)
        engine.step()
        report["weights"].append(full_weights(engine))
        report["applied"].append(engine.was_step_applied())
    engine.destroy()
    return report


OVERFLOW = windows_of([AB, AB], [AB, AB, AB], [A], [AB, AB], [B])


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accum_dtype", ["fp16", "fp32"])
def test_overflow_leaves_no_trace(ranks: RankPool, stage: int, accum_dtype: str, bad: int) -> None:
    config = offload_config(stage, dtype="fp16", accum_dtype=accum_dtype)
    first, *rest = reference(same_on_all_ranks([w for i, w in enumerate(OVERFLOW) if i != 1]))
    for report in ranks.run(overflow_windows, config=config, bad=bad):
        assert report["applied"] == [True, False, True, True, True]
        assert report["weights"] == [first, first, *rest]


def norms_and_weights(config: dict[str, Any], kind: str) -> dict[str, Any]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    make = {
        "cpu_adam": lambda p: DeepSpeedCPUAdam(p, lr=0.01, adamw_mode=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
    }[kind]
    engine = make_engine(config, optimizer=make)
    report: dict[str, Any] = {"norms": [], "weights": []}
    for window in REQUESTS:
        run_window(engine, window, scale_wrt_gas=False)
        report["norms"].append(float(engine.get_global_grad_norm()))
        report["weights"].append(full_weights(engine))
    engine.destroy()
    return report


def clipped_adam(clip: float) -> dict[str, Any]:
    from harness.model import tensors

    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    report: dict[str, Any] = {"norms": [], "weights": []}
    for window in REQUESTS:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for rank in range(2):
            for micro_batch in window:
                if micro_batch:
                    (model(tensors(micro_batch, rank, torch.float32)) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        report["norms"].append(float(norm))
        report["weights"].append({n: p.detach().clone() for n, p in model.named_parameters()})
    return report


def assert_adam_close(ours: Weights, theirs: dict[str, torch.Tensor]) -> None:
    """Adam's arithmetic differs by implementation (fused multiply-add, order of the bias
    corrections), so each of nine steps of 0.01 may round differently."""
    for name, weight in theirs.items():
        difference = (torch.tensor(ours[name]) - weight).abs().max()
        assert difference < 2e-5, name


@pytest.mark.thorough
@pytest.mark.parametrize("clip", [0.0, 2.0])
@pytest.mark.parametrize(
    "kind", [pytest.param("cpu_adam", marks=pytest.mark.builds_op("CPUAdamBuilder")), "adamw"]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "accum_dtype"), PRECISIONS)
def test_adam_norm_and_clipping(
    ranks: RankPool, stage: int, kind: str, dtype: str, accum_dtype: str | None, clip: float
) -> None:
    config = offload_config(stage, dtype=dtype, accum_dtype=accum_dtype)
    config["gradient_clipping"] = clip
    expected = clipped_adam(clip)
    for report in ranks.run(norms_and_weights, config=config, kind=kind):
        # Squares are summed in another order: a few fp32 roundings.
        assert report["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        for ours, theirs in zip(report["weights"], expected["weights"]):
            assert_adam_close(ours, theirs)


def unused_parameter(config: dict[str, Any]) -> None:
    engine = make_engine(config)
    run_window(engine, [{"a": 1, "b": 1}])
    run_window(engine, [{"a": 2}])
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2])
def test_unused_parameters_are_reported_at_step_if_asked_for(ranks: RankPool, stage: int) -> None:
    ignoring = offload_config(stage)
    ranks.run(unused_parameter, config=ignoring)
    reporting = offload_config(stage, zero={"ignore_unused_parameters": False})
    with pytest.raises(RanksFailed, match=r"(?s)step\(.*were not used in producing loss"):
        ranks.run(unused_parameter, config=reporting)


def move_states(config: dict[str, Any]) -> dict[str, Any]:
    from deepspeed.ops.adam import FusedAdam  # what offload_states() supports at stage 3

    import ds_unmanaged_gas

    engine = make_engine(config, optimizer=lambda p: FusedAdam(p, lr=0.01))
    report: dict[str, Any] = {"weights": []}
    for number, window in enumerate(REQUESTS):
        for micro, micro_batch in enumerate(window):
            engine.backward(forward(engine, micro_batch), scale_wrt_gas=False)
            if number == 1 and micro == 0:
                try:
                    engine.offload_states()
                except ds_unmanaged_gas.WindowOpenError as error:
                    report["refused"] = str(error)
        engine.step()
        report["weights"].append(full_weights(engine))
        engine.offload_states(pin_memory=False)  # up to 0.19.3 pinning needs a GPU
        engine.reload_states()
    engine.destroy()
    return report


@pytest.mark.builds_op("FusedAdamBuilder")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_states_between_windows_only(ranks: RankPool, stage: int) -> None:
    expected = clipped_adam(0.0)["weights"]
    for report in ranks.run(move_states, config=make_config(stage=stage)):
        assert "1 backwards" in report["refused"]
        for ours, theirs in zip(report["weights"], expected):
            assert_adam_close(ours, theirs)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_control_managed_offload_applies_an_absent_parameter_again(
    ranks: RankPool, stage: int
) -> None:
    windows = windows_of([AB, AB], [A, A])
    config = offload_config(stage, gas=2, unmanaged=False)
    results = ranks.run(train_managed, plugin=False, windows=windows, config=config)
    expected = reference(same_on_all_ranks(windows))
    for history in results:
        assert history[0] == expected[0]
        assert history[1] != expected[1]


def test_control_managed_stage2_offload_loses_micro_batches(ranks: RankPool) -> None:
    windows = windows_of([AB, AB, AB])
    config = offload_config(2, gas=3, unmanaged=False)
    results = ranks.run(train_managed, plugin=False, windows=windows, config=config)
    right = results == [reference(same_on_all_ranks(windows))] * 2
    assert right == (not between("0.15.2", "0.18.9"))


def test_control_managed_offload_forgets_a_parameter_absent_from_the_last_backward(
    ranks: RankPool,
) -> None:
    windows = windows_of([AB, A])
    for stage in (2, 3):
        config = offload_config(stage, gas=2, unmanaged=False)
        results = ranks.run(train_managed, plugin=False, windows=windows, config=config)
        assert results != [reference(same_on_all_ranks(windows))] * 2
