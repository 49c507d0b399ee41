"""I2 and I4: what a window adds up to, against plain PyTorch, with zero tolerance.

The arithmetic is exact (see harness.model), so every stage, precision and release must give the
very numbers of the reference.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness.model import reference, same_on_all_ranks
from harness.pool import RankPool
from harness.training import STAGES, make_config, train

PRECISIONS = [
    pytest.param("fp32", None, id="fp32"),
    pytest.param("bf16", "bf16", id="bf16"),
    pytest.param("bf16", "fp32", id="bf16-fp32"),
    pytest.param("fp16", "fp16", id="fp16"),
    pytest.param("fp16", "fp32", id="fp16-fp32"),
]

AB = ("a", "b")


def windows_of(*windows: list[tuple[str, ...]]) -> list[list[dict[str, int]]]:
    """One list per window, one tuple of head names per micro-batch; every micro-batch new data."""
    seeds = iter(range(1, 1000))
    return [[dict.fromkeys(heads, seed) for heads, seed in zip(w, seeds)] for w in windows]


VARYING = windows_of(*([AB] * count for count in (2, 5, 3, 1, 1, 4)))

# A name for each history of participation that stock code gets wrong somewhere.
PARTICIPATION = {
    "late after use": windows_of([AB, AB], [("a",), AB, ("b",)], [("b",), ("a",)]),
    "absent for a window": windows_of([AB, AB], [("a",), ("a",)], [("b",)], [AB], [("a",)]),
    "first use in a later window": windows_of([("a",), ("a",)], [AB], [("a",)], [("b",)]),
    "absent from the last backward": windows_of([AB], [AB, ("a",)], [("b",), ("a",)]),
    "another head in each window": windows_of([("a",)], [("b",)], [("a",)], [("b",), ("b",)]),
    "zero loss before useful work": windows_of([AB], [(), AB], [(), ("a",), ()], [AB]),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("dtype", "accum_dtype"), PRECISIONS)
def test_varying_number_of_backwards(
    ranks: RankPool, stage: int, dtype: str, accum_dtype: str | None
) -> None:
    windows = same_on_all_ranks(VARYING)
    config = make_config(stage=stage, dtype=dtype, accum_dtype=accum_dtype)
    for history in ranks.run(train, windows_by_rank=windows, config=config):
        assert history == reference(windows)


@pytest.mark.parametrize("case", PARTICIPATION)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("dtype", "accum_dtype"), PRECISIONS)
def test_participation(
    ranks: RankPool, case: str, stage: int, dtype: str, accum_dtype: str | None
) -> None:
    windows = same_on_all_ranks(PARTICIPATION[case])
    config = make_config(stage=stage, dtype=dtype, accum_dtype=accum_dtype)
    for history in ranks.run(train, windows_by_rank=windows, config=config):
        assert history == reference(windows)


ZERO_OPTIONS: dict[str, dict[str, Any]] = {
    "overlap_comm": {"overlap_comm": True},
    "no overlap_comm": {"overlap_comm": False},
    "not contiguous": {"contiguous_gradients": False},
    "not contiguous, overlap_comm": {"contiguous_gradients": False, "overlap_comm": True},
    "bucket smaller than a parameter": {"reduce_bucket_size": 16},
    "bucket smaller than a parameter, overlap_comm": {
        "reduce_bucket_size": 16,
        "overlap_comm": True,
    },
    "no reduce_scatter": {"reduce_scatter": False},
    "round_robin_gradients": {"round_robin_gradients": True},
    "persistent parameters": {"stage3_param_persistence_threshold": 100000},
    "one sub group per parameter": {"sub_group_size": 1},
}


@pytest.mark.thorough
@pytest.mark.parametrize("option", ZERO_OPTIONS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("dtype", "accum_dtype"), [PRECISIONS[0], PRECISIONS[2]])
def test_zero_options(
    ranks: RankPool, option: str, stage: int, dtype: str, accum_dtype: str | None
) -> None:
    if option == "round_robin_gradients" and dtype != "fp32":
        pytest.skip("safe_get_full_fp32_param reads the wrong fragments with round_robin_gradients")
    windows = same_on_all_ranks([*VARYING, *PARTICIPATION["late after use"]])
    config = make_config(
        stage=stage, dtype=dtype, accum_dtype=accum_dtype, zero=ZERO_OPTIONS[option]
    )
    for history in ranks.run(train, windows_by_rank=windows, config=config):
        assert history == reference(windows)
