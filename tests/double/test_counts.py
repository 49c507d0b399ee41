"""A window waits, copies and launches no more than in managed mode. All rows: nox -s gpu_counts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from harness.pool import RankPool, configure_environment

configure_environment()

_spec = importlib.util.spec_from_file_location(
    "gpu_counts", Path(__file__).parents[1] / "bench" / "gpu_counts.py"
)
assert _spec is not None
assert _spec.loader is not None
gpu_counts: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gpu_counts)


@pytest.mark.parametrize(
    "cell",
    [
        (0, None, "fp32", False, "backward", 1),
        (1, None, "bf16-fp32", True, "backward", 1),
        (2, "optimizer", "fp16", False, "backward", 4),
        (3, "optimizer", "bf16", True, "backward", 4),
        pytest.param((0, None, "fp16", False, "backward", 4), marks=pytest.mark.thorough),
        pytest.param((1, "optimizer", "fp32", True, "backward", 4), marks=pytest.mark.thorough),
        pytest.param((2, None, "bf16", True, "step", 4), marks=pytest.mark.thorough),
        pytest.param((3, None, "fp32", True, "step", 1), marks=pytest.mark.thorough),
        pytest.param((3, "param", "fp16", False, "backward", 1), marks=pytest.mark.thorough),
    ],
)
def test_nothing_is_counted_above_managed_mode(gpu_ranks: RankPool, cell: Any) -> None:
    ours, managed = gpu_counts.compare(gpu_ranks, cell, num_layers=8, size=4)
    assert ours["kernels"] > 0
    more = {kind: (n, managed[kind]) for kind, n in ours.items() if n > managed[kind]}
    assert more == {} or gpu_counts.reason_for_more(cell, list(more)) is not None, more
