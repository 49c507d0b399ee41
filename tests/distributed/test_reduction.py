"""``"reduction": "step"``: stages 2 and 3 reduce once per window, and give the same update."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from harness.model import MIXED_WINDOWS, Heads, Weights, Window, reference, same_on_all_ranks
from harness.pool import RankPool
from harness.releases import DEEPSPEED, between, skip_without_torch_style
from harness.training import (
    PARTITIONED_MODES,
    REDUCED_AT_STEP,
    forward,
    full_weights,
    make_config,
    make_engine,
    mode_config,
    run_windows,
    train,
)

PRECISIONS = [
    ("fp32", None),
    pytest.param("bf16", "bf16", marks=pytest.mark.thorough),
    ("bf16", "fp32"),
    pytest.param("fp16", "fp16", marks=pytest.mark.thorough),
    pytest.param("fp16", "fp32", marks=pytest.mark.thorough),
]

WINDOWS: list[Window] = [*MIXED_WINDOWS, [{}, {"a": 10, "b": 10}]]

AT_STAGES_2_AND_3 = pytest.mark.parametrize(("stage", "offload"), PARTITIONED_MODES)


@AT_STAGES_2_AND_3
@pytest.mark.parametrize(("dtype", "accum_dtype"), PRECISIONS)
@pytest.mark.parametrize(
    "zero",
    [
        pytest.param({}, id="default"),
        pytest.param({"overlap_comm": True}, id="overlap", marks=pytest.mark.thorough),
        pytest.param({"contiguous_gradients": False}, id="apart", marks=pytest.mark.thorough),
        pytest.param({"reduce_bucket_size": 16, "overlap_comm": True}, id="small buckets"),
    ],
)
def test_same_update(
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
    windows = same_on_all_ranks(WINDOWS)
    expected = reference(windows)
    for history in ranks.run(train, windows_by_rank=windows, config=config):
        assert history == expected


def train_torch_style(windows: list[Window], config: dict[str, Any]) -> list[Weights]:
    engine = make_engine(config)
    history = []
    for window in windows:
        for micro_batch in window:
            forward(engine, micro_batch).backward()
        engine.step()
        history.append(full_weights(engine))
    engine.destroy()
    return history


@AT_STAGES_2_AND_3
def test_torch_style(ranks: RankPool, stage: int, offload: bool) -> None:
    skip_without_torch_style(stage)
    config = mode_config(stage, offload, **REDUCED_AT_STEP)
    expected = reference(same_on_all_ranks(WINDOWS))
    assert ranks.run(train_torch_style, windows=WINDOWS, config=config) == [expected, expected]


def many_small(config: dict[str, Any]) -> float:
    """The first weight after a window of one large and 256 small gradients."""
    model = torch.nn.Linear(1, 4, bias=False)  # something for each rank
    torch.nn.init.zeros_(model.weight)
    engine = make_engine(config, model=model, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    for size in [256.0] + [1.0] * 256:
        engine.backward((engine(one) * size).sum(), scale_wrt_gas=False)
    engine.step()
    weight = float(deepspeed.utils.safe_get_full_fp32_param(model.weight)[0])
    engine.destroy()
    return weight


@AT_STAGES_2_AND_3
def test_sums_in_fp32_are_reduced_in_fp32(ranks: RankPool, stage: int, offload: bool) -> None:
    """In bf16 256 + 1 is 256. The sum, 512, is a bf16 number: what counts is how it came about."""
    config = mode_config(stage, offload, dtype="bf16", accum_dtype="fp32", **REDUCED_AT_STEP)
    assert ranks.run(many_small, config=config) == [-512.0, -512.0]


def dtype_of_reduction(config: dict[str, Any]) -> str:
    engine = make_engine(config)
    dtype = str(engine.optimizer.communication_data_type)
    engine.destroy()
    return dtype


@pytest.mark.parametrize("stage", [2, 3])
def test_the_callers_reduction_dtype_stays(ranks: RankPool, stage: int) -> None:
    if stage == 2 and between("0.17.2", "0.18.1"):
        pytest.skip(f"ZeRO-2 of DeepSpeed {DEEPSPEED} can reduce in the model's dtype only")
    config = make_config(stage=stage, dtype="bf16", accum_dtype="fp32", **REDUCED_AT_STEP)
    assert set(ranks.run(dtype_of_reduction, config=config)) == {"torch.float32"}
    config["communication_data_type"] = "bf16"
    assert set(ranks.run(dtype_of_reduction, config=config)) == {"torch.bfloat16"}


class OneModule(torch.nn.Module):
    """The heads' weights in one module, which gathers them all whatever it uses."""

    def __init__(self) -> None:
        super().__init__()
        heads = Heads()
        for name, parameter in heads.named_parameters():
            self.register_parameter(name.replace(".", "_"), parameter)

    def forward(self, batch: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        losses = [
            (
                torch.nn.functional.linear(
                    x, getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
                )
                * t
            ).sum()
            for name, (x, t) in batch.items()
        ]
        return torch.stack(losses).sum()


def train_one_module(windows_by_rank: list[list[Window]], config: dict[str, Any]) -> list[Weights]:
    engine = make_engine(config, model=OneModule())
    history = run_windows(engine, windows_by_rank[deepspeed.comm.get_rank()])
    engine.destroy()
    return history


@pytest.mark.parametrize("offload", [False, True], ids=["no-offload", "offload"])
@pytest.mark.parametrize("overlap", [False, True], ids=["no-overlap", "overlap"])
def test_ranks_that_use_different_parameters_at_stage_3(
    ranks: RankPool, offload: bool, overlap: bool
) -> None:
    """As far as ZeRO-3 itself lets them: its forward and backward make collectives of their own,
    module by module, and it compares the order of modules across ranks."""
    used = [
        [["a", "b"], ["ab"], ["b", "b"], ["ab"]],
        [["b", "ab"], ["a"], ["a", "ab"], ["b"]],
    ]
    windows_by_rank: list[list[Window]] = [
        [
            [dict.fromkeys(heads, 10 * number + micro) for micro, heads in enumerate(window)]
            for number, window in enumerate(windows)
        ]
        for windows in used
    ]
    config = mode_config(3, offload, zero={"overlap_comm": overlap}, **REDUCED_AT_STEP)
    expected = [
        {name.replace(".", "_"): value for name, value in weights.items()}
        for weights in reference(windows_by_rank)
    ]
    for history in ranks.run(train_one_module, windows_by_rank=windows_by_rank, config=config):
        assert history == expected
