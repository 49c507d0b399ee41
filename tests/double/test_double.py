"""The accelerator double itself: late unless someone waits, and it tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.pool import RankPool


def on_rank(gpu_ranks: RankPool, task: Callable[..., Any], **kwargs: Any) -> Any:
    return gpu_ranks.run(task, plugin=False, **kwargs)[0]


def read_pinned(waits_by: str) -> dict[str, Any]:
    from harness import double

    host = double.pin_memory(torch.zeros(4))
    ones = torch.ones(4, device="cuda")
    double.finish()
    double.RECORD.reset()
    host.copy_(ones, non_blocking=True)
    event = double.DEFAULT.record_event()
    if waits_by == "event":
        event.synchronize()
    elif waits_by == "stream":
        double.DEFAULT.synchronize()
    elif waits_by == "device":
        double.synchronize()
    elif waits_by == "item":
        assert float(ones[0]) == 1
    elif waits_by == "blocking copy":
        assert ones.cpu().tolist() == [1, 1, 1, 1]
    value = float(host[0])
    return {"value": value, **double.RECORD.as_dict()}


@pytest.mark.parametrize("waits_by", ["event", "stream", "device", "item", "blocking copy"])
def test_a_copy_to_pinned_memory_arrives_with_a_wait(gpu_ranks: RankPool, waits_by: str) -> None:
    report = on_rank(gpu_ranks, read_pinned, waits_by=waits_by)
    assert report["value"] == 1
    assert report["races"] == {}
    assert report["waits"] == {waits_by.rsplit(maxsplit=1)[-1]: 1}


def test_without_a_wait_the_host_sees_old_memory(gpu_ranks: RankPool) -> None:
    report = on_rank(gpu_ranks, read_pinned, waits_by="nothing")
    assert report["value"] == 0
    (race,) = report["races"]
    assert race.startswith("default stream writes")
    assert "host reads" in race
    assert report["waits"] == {}
    assert report["copies"] == {"to the host": 1}
    assert report["bytes"] == {"to the host": 16}


def read_pageable() -> dict[str, Any]:
    from harness import double

    host, ones = torch.zeros(4), torch.ones(4, device="cuda")
    double.finish()
    double.RECORD.reset()
    host.copy_(ones, non_blocking=True)
    value = float(host[0])
    source = torch.ones(4)
    there = torch.empty(4, device="cuda")
    there.copy_(source, non_blocking=True)  # read at once
    source.fill_(2)
    return {"value": value, **double.RECORD.as_dict(), "there": there.tolist()}


def test_a_copy_of_pageable_memory_is_not_late(gpu_ranks: RankPool) -> None:
    report = on_rank(gpu_ranks, read_pageable)
    assert report["value"] == 1
    assert report["there"] == [1, 1, 1, 1]
    assert report["races"] == {}
    assert report["waits"] == {"copy": 1}


def two_streams(waits: bool) -> dict[str, Any]:
    from harness import double

    side = double.Stream()
    memory = torch.zeros(4, device="cuda")
    double.finish()
    double.RECORD.reset()
    memory.fill_(1)
    if waits:
        side.wait_stream(double.DEFAULT)
    with double.on_stream(side):
        seen = memory + 0
        side.synchronize()
        return {"seen": seen.tolist(), "races": double.RECORD.as_dict()["races"]}


def test_a_stream_that_does_not_wait_sees_old_memory(gpu_ranks: RankPool) -> None:
    report = on_rank(gpu_ranks, two_streams, waits=False)
    assert report["seen"] == [0, 0, 0, 0]
    assert len(report["races"]) == 1
    report = on_rank(gpu_ranks, two_streams, waits=True)
    assert report == {"seen": [1, 1, 1, 1], "races": {}}


def free_early(records: bool) -> dict[str, Any]:
    from harness import double

    side = double.Stream()
    memory = torch.ones(333, device="cuda")
    side.wait_stream(double.DEFAULT)
    double.finish()
    double.RECORD.reset()
    with double.on_stream(side):
        seen = memory + 0
    if records:
        memory.record_stream(side)  # type: ignore[arg-type]
    del memory
    torch.full((333,), 2.0, device="cuda")
    double.DEFAULT.synchronize()
    side.synchronize()
    with double.on_stream(side):
        return {"seen": seen[0].item(), "races": double.RECORD.as_dict()["races"]}


def test_freed_memory_is_given_out_again(gpu_ranks: RankPool) -> None:
    report = on_rank(gpu_ranks, free_early, records=False)
    assert report["seen"] == 2
    assert len(report["races"]) == 1
    assert on_rank(gpu_ranks, free_early, records=True) == {"seen": 1, "races": {}}


def convert_late(in_one_call: bool) -> dict[str, Any]:
    from harness import double

    pinned = double.pin_memory(torch.zeros(4))
    double.finish()
    double.RECORD.reset()
    pinned.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    if in_one_call:
        back = pinned.to("cuda", torch.bfloat16, non_blocking=True)
    else:
        back = pinned.to("cuda", non_blocking=True).to(torch.bfloat16)
    races = double.RECORD.as_dict()["races"]
    return {"back": back.tolist(), "races": len(races)}


def test_a_copy_that_converts_reads_the_host_at_once(gpu_ranks: RankPool) -> None:
    assert on_rank(gpu_ranks, convert_late, in_one_call=True) == {"back": [0] * 4, "races": 1}
    assert on_rank(gpu_ranks, convert_late, in_one_call=False) == {"back": [1] * 4, "races": 0}


def places() -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator
    from harness import double

    host, device = torch.ones(2), torch.ones(2, device="cuda:0")
    parameter = torch.nn.Linear(2, 2).to("cuda").weight
    (parameter * 2).sum().backward()
    errors = []
    for mistake in (
        lambda: host + device,
        lambda: double.pin_memory(device),
        lambda: torch.distributed.all_reduce(host),
    ):
        with pytest.raises(RuntimeError) as error:
            mistake()
        errors.append(str(error.value))
    return {
        "devices": [str(t.device) for t in (host, device, parameter, parameter.grad, device[:1])],
        "types": [host.type(), device.type()],
        "host again": str(device.cpu().device),
        "like": str(torch.zeros_like(device).device),
        "number from the host": (device * torch.tensor(3.0)).tolist(),
        "accelerator": get_accelerator().current_device_name(),
        "errors": errors,
    }


def test_tensors_tell_where_they_are(gpu_ranks: RankPool) -> None:
    report = on_rank(gpu_ranks, places)
    assert report["devices"] == ["cpu", *["cuda:0"] * 4]
    assert report["types"] == ["torch.FloatTensor", "torch.cuda.FloatTensor"]
    assert report["host again"] == "cpu"
    assert report["like"] == report["accelerator"] == "cuda:0"
    assert report["number from the host"] == [3, 3]
    assert len(report["errors"]) == 3


def classes(dtype: str, accum_dtype: str | None) -> list[str]:
    from harness import double
    from harness.training import make_config, make_engine

    config = make_config(stage=0, dtype=dtype, accum_dtype=accum_dtype, unmanaged=False)
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.1}}
    config["fp16"] = {"enabled": dtype == "fp16", "loss_scale": 0, "initial_scale_power": 4}
    from deepspeed import initialize
    from harness.model import Heads

    model = Heads()
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    fused = make_engine(
        make_config(stage=0, unmanaged=False), optimizer=lambda p: double.FusedSGD(p, lr=0.1)
    )
    names = [type(engine.optimizer).__name__, type(engine.basic_optimizer).__name__]
    names.append(str(isinstance(fused.basic_optimizer, double.FusedAdam)))
    engine.destroy()
    fused.destroy()
    return names


def test_deepspeed_chooses_the_classes_of_a_gpu(gpu_ranks: RankPool) -> None:
    names = on_rank(gpu_ranks, classes, dtype="fp16", accum_dtype=None)
    assert names == ["FP16_Optimizer", "FusedAdam", "True"]
