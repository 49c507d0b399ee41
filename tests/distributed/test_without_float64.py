"""Sums over ranks on a device that has no float64, and by how many ranks a mean was taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness.model import MIXED_WINDOWS, reference, same_on_all_ranks
from harness.pool import RankPool
from harness.training import forward, full_weights, make_config, make_engine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MOST = 2**53
"""Up to which float64 has every integer. fp32: 2**24."""


class Seen(TorchDispatchMode):
    """The dtypes of all that is computed, and the number of all-reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.num_all_reduces = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_all_reduces += "allreduce" in str(func)
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self.dtypes.add(leaf.dtype)
        return result


@contextmanager
def float64(supported: bool) -> Iterator[None]:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    # Up to 0.19.5 there is no such method.
    accelerator.is_fp64_supported = lambda: supported  # type: ignore[method-assign]
    try:
        yield
    finally:
        del accelerator.is_fp64_supported


SUMS: dict[str, tuple[list[list[float]], list[float]]] = {
    "nothing": ([[0.0], [0.0]], [0.0]),
    "near 2**53": ([[2**52 + 1, 3], [2**52 - 2, 2**40 + 1]], [2**53 - 1, 2**40 + 4]),
    "2**53": ([[2**53 - 1], [1]], [2**53]),
    "fractions": ([[0.5, 2**30 + 0.125], [0.25, 2.0**-20]], [0.75, 2**30 + 0.125 + 2.0**-20]),
    "wholes of fractions": ([[0.75], [0.75]], [1.5]),
}


def sums(by_rank: list[list[float]], supported: bool) -> dict[str, Any]:
    import deepspeed

    from ds_unmanaged_gas.unmanaged import _sum_over_ranks

    engine = make_engine(make_config(stage=0))
    with float64(supported), Seen() as seen:
        total = _sum_over_ranks(engine, by_rank[deepspeed.comm.get_rank()], None)
    engine.destroy()
    return {
        "sums": total,
        "has float64": torch.float64 in seen.dtypes,
        "all-reduces": seen.num_all_reduces,
    }


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("name", SUMS)
def test_sum_over_ranks_is_exact(ranks: RankPool, name: str, supported: bool) -> None:
    by_rank, expected = SUMS[name]
    for report in ranks.run(sums, by_rank=by_rank, supported=supported):
        assert report == {"sums": expected, "has float64": supported, "all-reduces": 1}


def test_sum_of_any_fractions_is_close(ranks: RankPool) -> None:
    for report in ranks.run(sums, by_rank=[[1 / 3, 1e6 / 7], [2 / 7, 0.1]], supported=False):
        assert report["sums"] == pytest.approx([1 / 3 + 2 / 7, 1e6 / 7 + 0.1], abs=2.0**-39, rel=0)


def error_of_a_sum(number: float) -> str:
    import deepspeed

    from ds_unmanaged_gas.unmanaged import _sum_over_ranks

    engine = make_engine(make_config(stage=0))
    numbers = [1.0, number if deepspeed.comm.get_rank() == 1 else 1.0]
    try:
        with float64(supported=False):
            _sum_over_ranks(engine, numbers, None)
    except Exception as error:
        engine.destroy()
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("number", [2.0**54, 1e300])
def test_sum_that_is_too_large_is_an_error_on_every_rank(ranks: RankPool, number: float) -> None:
    for text in ranks.run(error_of_a_sum, number=number):
        assert text.startswith("WindowArgumentError: 1801439850948198")
        assert "larger units" in text


def train_counting(config: dict[str, Any], supported: bool, knows_size: bool) -> dict[str, Any]:
    """Each loss is multiplied by what the step divides by, the items of this rank's window."""
    import ds_unmanaged_gas

    engine = make_engine(config)
    if not knows_size:
        engine.dp_world_size = None  # as with an mpu that has initialize_sequence_parallel()
    window = ds_unmanaged_gas.accumulation(engine)
    weights, norms = [], []
    with float64(supported), Seen() as seen:
        for micro_batches in MIXED_WINDOWS:
            items = 2**30 if micro_batches else 0
            for micro_batch in micro_batches:
                loss = forward(engine, micro_batch) * float(items * len(micro_batches))
                window.backward(loss, num_items=items)
            norms.append(window.grad_norm())
            window.step()
            weights.append(full_weights(engine))
    engine.destroy()
    return {"weights": weights, "norms": norms, "has float64": torch.float64 in seen.dtypes}


@pytest.mark.parametrize("knows_size", [True, False])
@pytest.mark.parametrize("supported", [True, False])
def test_window_divided_by_items(ranks: RankPool, supported: bool, knows_size: bool) -> None:
    block = {"gradient_scale": "num_items", "check_ranks": True}
    config = make_config(stage=0, unmanaged_gradient_accumulation=block)
    expected = reference(same_on_all_ranks(MIXED_WINDOWS))
    for report in ranks.run(
        train_counting, config=config, supported=supported, knows_size=knows_size
    ):
        assert report["weights"] == expected
        assert report["norms"][3] == 0.0 < report["norms"][0]
        assert report["has float64"] == supported
