"""Where one reduction is made, at step(), ranks may do different things before it."""

from __future__ import annotations

from typing import Any

import pytest
from harness.model import reference
from harness.pool import RankPool
from harness.training import REDUCED_AT_STEP, mode_config, train

BLOCK = "unmanaged_gradient_accumulation"
A, B, AB = ("a",), ("b",), ("a", "b")

# Rank 0's heads per micro-batch, then rank 1's; window by window.
CASES = {
    "a parameter used on one rank only": [([A, AB], [AB, AB]), ([A], [A]), ([A], [AB])],
    "a different head on each rank": [([A], [B]), ([B], [A]), ([A, A], [B])],
    "different numbers of backwards": [([AB] * 2, [AB] * 3), ([AB], [AB] * 4), ([AB], [AB])],
    "a rank without any backward": [([AB, AB], []), ([], [AB]), ([AB], [AB])],
    "first window on one rank only": [([], [AB, A]), ([AB], [AB])],
    "different micro-batches use it": [([AB, A], [A, AB]), ([B, A], [AB])],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0},
        {"stage": 0, "dtype": "bf16", "accum_dtype": "bf16"},
        {"stage": 1},
        {"stage": 1, "dtype": "bf16", "accum_dtype": "bf16"},
        {"stage": 1, "dtype": "bf16", "accum_dtype": "fp32"},
        {"stage": 1, "dtype": "fp16", "accum_dtype": "fp32"},
        {"stage": 1, "zero": {"overlap_comm": True}},
        {"stage": 1, "zero": {"overlap_comm": True, "contiguous_gradients": False}},
        {"stage": 1, "zero": {"reduce_bucket_size": 16, "overlap_comm": True}},
        {"stage": 2, **REDUCED_AT_STEP},
        {"stage": 2, "dtype": "bf16", "accum_dtype": "fp32", **REDUCED_AT_STEP},
        {"stage": 2, "zero": {"overlap_comm": True}, **REDUCED_AT_STEP},
        {"stage": 2, "offload": True, **REDUCED_AT_STEP},
        {"stage": 2, "offload": True, "dtype": "bf16", "accum_dtype": "fp32", **REDUCED_AT_STEP},
    ],
    ids=lambda o: (
        "-".join(f"{k}={v}" if isinstance(v, bool) else str(v) for k, v in o.items() if k != BLOCK)
        + ("-at step" if BLOCK in o else "")
    ),
)
def test_ranks_that_differ(ranks: RankPool, case: str, options: dict[str, Any]) -> None:
    windows_by_rank = [
        [
            [dict.fromkeys(heads, 10 * w + m + 1) for m, heads in enumerate(per_rank[rank])]
            for w, per_rank in enumerate(CASES[case])
        ]
        for rank in range(2)
    ]
    config = mode_config(**{"offload": False, **options})
    for history in ranks.run(train, windows_by_rank=windows_by_rank, config=config):
        assert history == reference(windows_by_rank)
