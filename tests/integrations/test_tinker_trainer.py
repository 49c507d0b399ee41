"""The engine side of examples/tinker_server against plain PyTorch: one engine, several models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.pool import RankPool
from harness.tinker_process import Reference, largest_difference

pytest.importorskip("tinker", reason="the wire format is the tinker SDK's (Python 3.11 or later)")

from tinker_server.wire import AdamParams, Datum, Work

pytestmark = [
    # Nothing of this package runs in this process; transformers and peft warn of themselves.
    pytest.mark.filterwarnings("ignore"),
]

ADAM = [
    {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3},
    {"learning_rate": 3e-3, "beta1": 0.8, "beta2": 0.99, "eps": 5e-3, "weight_decay": 0.1},
    {"learning_rate": 2e-2, "beta1": 0.5, "beta2": 0.9, "eps": 2e-3, "grad_clip_norm": 0.5},
]
"""Everything that an update depends on, each time another value."""

TOLERANCE = 2e-5
"""Largest accepted difference of a weight.

Gradients are summed in another order (micro-batches of two, ranks, buckets), with a rounding error
of some 2**-24 of the largest summand, which is of order 10. AdamW divides by at least eps, so that
an update is off by up to lr * 10 * 2**-24 / eps = 6e-6, and three updates with what they change in
each other by a few times that. A lost, doubled or mixed-up datum is an error of the order of lr.
"""


def datum(seed: int, length: int) -> Datum:
    dice = np.random.RandomState(seed)
    tokens = dice.randint(0, 256, length + 1)
    return Datum(tokens[:-1], tokens[1:], {"weights": dice.rand(length).astype(np.float32)})


def work(*seeds: int) -> Work:
    return Work([datum(seed, 3 + seed % 5) for seed in seeds], "cross_entropy", {})


WINDOWS = [[work(1), work(2, 3)], [work(4, 5, 6, 7, 8)], [work(9, 10), work(11), work(12, 13, 14)]]


def train_two_slots(stage: int, lora_rank: int, micro: int, folder: str) -> list[dict[str, Any]]:
    """Train slots 0 and 2 in turns, slot 2 on the windows backwards. Returns what rank 0 saved
    before the first and after each update of slot 0, and of slot 1, which nobody trained."""
    import torch
    from tinker_server.team import Team
    from tinker_server.trainer import Trainer

    team = Team()
    trainer = Trainer(team, path=None, slots=3, lora_rank=lora_rank, stage=stage, micro=micro)
    files = []

    def save(slot: int) -> None:
        files.append(f"{folder}/{len(files)}.pt")
        trainer.save(slot=slot, path=files[-1])

    for slot in range(3):
        trainer.reset(slot=slot, seed=slot)
    save(0)
    save(2)
    for window, other, adam in zip(WINDOWS, WINDOWS[::-1], ADAM):
        for slot, requests in ((0, window), (2, other)):
            first = 0
            for request in requests:
                trainer.run(slot=slot, work=request, first=first, train=True)
                # Neither touches the window.
                trainer.run(slot=1, work=request, first=first, train=False)
                first += len(request.data)
            if slot == 2:
                # What a discarded window had must not count.
                trainer.discard()
                first = 0
                for request in requests:
                    trainer.run(slot=slot, work=request, first=first, train=True)
                    first += len(request.data)
            trainer.step(slot=slot, adam=AdamParams(**adam))
            save(slot)
    save(1)
    trainer.engine.destroy()
    torch.distributed.barrier()
    return [torch.load(file) for file in files]


def reference(start: dict[str, Any], lora_rank: int, windows: Any) -> list[dict[str, Any]]:
    """The weights after each window by plain PyTorch."""
    model = Reference(start, lora_rank)
    history = []
    for window, adam in zip(windows, ADAM):
        for each in (each for request in window for each in request.data):
            model.cross_entropy(each.tokens, each.targets, each.inputs["weights"])
        model.step(**adam)
        history.append(model.weights())
    return history


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_models_in_one_engine_train_as_each_would_alone(
    ranks: RankPool, tmp_path: Path, stage: int, lora_rank: int
) -> None:
    saved = ranks.run(
        train_two_slots, stage=stage, lora_rank=lora_rank, micro=2, folder=str(tmp_path)
    )[0]
    for first, windows in ((0, WINDOWS), (1, WINDOWS[::-1])):
        expected = reference(saved[first]["weights"], lora_rank, windows)
        for index, weights in enumerate(expected):
            ours = saved[2 + 2 * index + first]
            assert ours["updates"] == index + 1
            difference = largest_difference(ours["weights"], weights)
            print(f"stage {stage}, model {first}, window {index}: {difference:.1e}")
            assert difference <= TOLERANCE
        # Not by being insensitive: one datum less is seen.
        less = [[*windows[0][:-1], Work(windows[0][-1].data[:-1], "cross_entropy", {})]]
        without = reference(saved[first]["weights"], lora_rank, less)[0]
        assert largest_difference(without, expected[0]) > 100 * TOLERANCE
    untouched = saved[-1]
    assert untouched["updates"] == 0
    for key in ("exp_avg", "exp_avg_sq"):
        assert all(not tensor.any() for tensor in untouched[key].values())


def fail_on_one_rank(stage: int) -> tuple[str, bool]:
    """A backward fails on rank 1 only, in the second of three micro-batches. Returns the error, and
    whether the slot trains on like one without an accident."""
    import torch
    from tinker_server.team import AgreedError, Team
    from tinker_server.trainer import Trainer

    trainer = Trainer(team := Team(), path=None, slots=2, lora_rank=4, stage=stage, micro=1)
    for slot in range(2):
        trainer.reset(slot=slot, seed=0)
    param = trainer.module.parameters_of(0)
    handle = next(reversed(param.values())).register_hook(
        lambda grad: 1 / 0 if team.rank == 1 and trainer.window.num_backwards == 1 else grad
    )
    error = ""
    try:
        trainer.run(slot=0, work=work(*range(6)), first=0, train=True)
    except AgreedError as failure:
        error = str(failure)
    handle.remove()
    trainer.discard()
    for slot in range(2):
        trainer.run(slot=slot, work=work(7, 8, 9), first=0, train=True)
        trainer.step(slot=slot, adam=AdamParams(**ADAM[0]))
    one, other = (trainer.module.parameters_of(slot) for slot in range(2))
    same = all(torch.equal(one[name], other[name]) for name in one)
    trainer.engine.destroy()
    return error, same


def test_a_backward_that_fails_on_one_rank_fails_on_all(ranks: RankPool) -> None:
    """At ZeRO-1, where backward() communicates nothing that the other rank would wait for."""
    (error_0, same_0), (error_1, same_1) = ranks.run(fail_on_one_rank, stage=1)
    assert error_0 == "failed on another rank"
    assert "ZeroDivisionError" in error_1
    assert same_0
    assert same_1
