"""Sums of an offloaded optimizer in pinned memory, on streams that nobody joins."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from harness.pool import RankPool
from harness.training import offload_config


def add_on_two_streams(accum_dtype: str, ordered: bool) -> dict[str, Any]:
    """Three contributions of one parameter, the second on another stream; and one of another
    parameter in the window before."""
    from harness import double

    from ds_unmanaged_gas import offload

    dtype = getattr(torch, accum_dtype)
    targets = [double.pin_memory(torch.full((4,), 7.0)) for _ in range(2)]
    spares = [double.pin_memory(torch.full((4,), 7.0, dtype=dtype)) for _ in range(2)]
    sums = offload.HostSums(dtype, targets.__getitem__, spares.__getitem__)
    streams = [double.Stream(name=name) for name in ("first", "second")]
    patch = mock.patch.object(offload, "order", return_value=None)
    double.finish()
    double.RECORD.reset()
    with nullcontext() if ordered else patch:
        sums.add([(1, torch.ones(4, device="cuda"))])
        sums.forget()  # dropped, with the copy still under way
        for index, value in ((0, 1.0), (1, 2.0), (0, 4.0)):
            with double.on_stream(streams[index]):
                sums.add([(0, torch.full((4,), value, device="cuda", dtype=dtype))])
        norms = sums.norms()
        sums.finalize()
    races = double.RECORD.as_dict()["races"]
    double.finish()
    return {
        "sums": [target.tolist() for target in targets],
        "norms": {key: float(norm) for key, norm in norms.items()},
        "races": len(races),
    }


@pytest.mark.parametrize("accum_dtype", ["float32", "bfloat16"])
def test_streams_that_nobody_joined_add_up(gpu_ranks: RankPool, accum_dtype: str) -> None:
    report = gpu_ranks.run(add_on_two_streams, accum_dtype=accum_dtype, ordered=True)[0]
    assert report == {"sums": [[7.0] * 4, [0.0] * 4], "norms": {0: 14.0}, "races": 0}


def test_without_the_order_of_streams_they_race(gpu_ranks: RankPool) -> None:
    report = gpu_ranks.run(add_on_two_streams, accum_dtype="float32", ordered=False)[0]
    assert report["races"] > 0


def add_converted(one_call: bool) -> dict[str, Any]:
    """A second contribution to a sum in another dtype than the optimizer's."""
    from harness import double

    from ds_unmanaged_gas import offload

    def add_in_one_call(self: Any, key: int, grad: torch.Tensor) -> torch.Tensor:
        if key not in self._seen:
            return add(self, key, grad)
        self._in_spare.add(key)
        total = self._target(key).to(grad.device, self._dtype, non_blocking=True).add_(grad)
        self._spare(key).copy_(total, non_blocking=True)
        return total

    add = offload.HostSums._add
    target = double.pin_memory(torch.zeros(4))
    spare = double.pin_memory(torch.zeros(4, dtype=torch.bfloat16))
    sums = offload.HostSums(torch.bfloat16, lambda _: target, lambda _: spare)
    double.finish()
    double.RECORD.reset()
    patch = mock.patch.object(offload.HostSums, "_add", add_in_one_call)
    with patch if one_call else nullcontext():
        for _ in range(2):
            sums.add([(0, torch.ones(4, device="cuda", dtype=torch.bfloat16))])
    sums.finalize()
    races = double.RECORD.as_dict()["races"]
    double.finish()
    return {"sum": target.tolist(), "races": len(races)}


def test_a_sum_is_converted_after_it_has_come_back(gpu_ranks: RankPool) -> None:
    right, wrong = (gpu_ranks.run(add_converted, one_call=one)[0] for one in (False, True))
    assert right == {"sum": [2.0] * 4, "races": 0}
    assert wrong["sum"] == [1.0] * 4
    assert wrong["races"] > 0


def divide_what_goes_to_nvme(config: dict[str, Any]) -> dict[str, Any]:
    """Sums that wait in stock's host buffer to be written out, as with optimizer states on NVMe."""
    from harness import double
    from harness.model import Layers
    from harness.training import make_engine

    from ds_unmanaged_gas import stage3

    engine = make_engine(config, model=Layers(3, 8))
    gradients = engine._ds_unmanaged_gas.gradients
    batch = engine.module.batch().to(engine.device)
    double.finish()
    double.RECORD.reset()
    always = mock.patch.object(stage3.Stage3OffloadGradients, "_is_on_nvme", return_value=True)
    hand_over = mock.patch.object(stage3.Stage3Gradients, "finalize")
    with always, hand_over:
        engine.backward(engine(batch))
        engine.backward(engine(batch))
        gradients.finalize(4.0)
    sums = [set(gradients._spare(ds_id).tolist()) for ds_id in gradients._params]
    races = double.RECORD.as_dict()["races"]
    engine.zero_grad()
    engine.destroy()
    return {"sums": sums, "races": races}


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_goes_to_nvme_is_divided_when_it_has_arrived(
    gpu_ranks: RankPool, overlaps: bool
) -> None:
    zero = {
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": overlaps,
        "reduce_bucket_size": 70,
    }
    timers = {"throughput": {"enabled": False}}
    config = offload_config(3, zero=zero, timers=timers)
    for report in gpu_ranks.run(divide_what_goes_to_nvme, config=config):
        assert report == {"sums": [{0.5}] * 3, "races": {}}
