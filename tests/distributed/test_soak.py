"""Random windows with faults in them: whatever happened, the weights are those of plain PyTorch.

SOAK_WINDOWS windows per case (20 by default; ``nox -s soak`` runs 200), drawn from SOAK_SEED, the
same on every rank. Each window has a random number of micro-batches over random heads, by
engine.backward() or loss.backward(); on the way it may be dropped, an exception may come out of
forward, backward or step, gradients and their norm are read, and checkpoints are saved and loaded.
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from typing import Any

import pytest
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from harness.model import LEARNING_RATE, Heads, tensors, weights_of
from harness.pool import RankPool
from harness.releases import HAS_TORCH_STYLE, uses_fp16_optimizer
from harness.training import (
    MODES,
    PARTITIONED_MODES,
    REDUCED_AT_STEP,
    broken_backward,
    broken_update,
    forward,
    full_weights,
    make_engine,
    mode_config,
)

NUM_WINDOWS = int(os.environ.get("SOAK_WINDOWS", "20"))
SEED = int(os.environ.get("SOAK_SEED", "1"))


class Reference:
    """Plain PyTorch on the data of all ranks, kept on every rank."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.model = Heads()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.saved: Any = None

    def step(self, window: list[dict[str, int]]) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for micro_batch in window:
            for rank in range(self.world_size if micro_batch else 0):
                self.model(tensors(micro_batch, rank, torch.float32)).backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= self.world_size
        self.optimizer.step()

    def save(self) -> None:
        self.saved = copy.deepcopy(self.model.state_dict())

    def load(self) -> None:
        self.model.load_state_dict(self.saved)


class Soak:
    def __init__(self, config: dict[str, Any], seed: int, folder: str, loads: bool) -> None:
        import deepspeed

        self.engine = make_engine(config)
        self.reference = Reference(deepspeed.comm.get_world_size())
        self.random = random.Random(seed)
        self.folder = folder
        self.loads = loads
        self.data = 0
        self.steps = 0
        is_zero = isinstance(self.engine.optimizer, ZeROOptimizer)
        self.has_torch_style = HAS_TORCH_STYLE and is_zero
        self.counts: Counter[str] = Counter()

    def chance(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    def micro_batch(self) -> dict[str, int]:
        self.data += 1
        heads = self.random.choice([("a", "b"), ("a", "b"), ("a",), ("b",), ()])
        return dict.fromkeys(heads, self.data % 97)

    def backward(self, micro_batch: dict[str, int]) -> None:
        loss = forward(self.engine, micro_batch)
        if self.has_torch_style and self.chance(30):
            self.counts["loss.backward()"] += 1
            loss.backward()
        else:
            self.counts["engine.backward()"] += 1
            self.engine.backward(loss, scale_wrt_gas=False)

    def fail_in_forward(self) -> None:
        handle = self.engine.module.b.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward(self.engine, {"a": 1, "b": 1})
        handle.remove()

    def fail_in_backward(self) -> None:
        with broken_backward(self.engine), pytest.raises(ZeroDivisionError):
            self.backward({"a": 1, "b": 1})
        self.refused_until_dropped()

    def fail_in_step(self) -> None:
        with broken_update(self.engine), pytest.raises(ZeroDivisionError):
            self.engine.step()
        self.refused_until_dropped()

    def refused_until_dropped(self) -> None:
        import ds_unmanaged_gas

        with pytest.raises(ds_unmanaged_gas.WindowFailedError):
            self.engine.step()
        assert not self.engine.is_gradient_accumulation_boundary()
        self.engine.zero_grad()

    def read(self) -> None:
        import deepspeed.utils

        import ds_unmanaged_gas

        parameters = list(self.engine.module.parameters())
        if self.chance(50):
            deepspeed.utils.safe_get_full_grad(self.random.choice(parameters))
        if self.chance(50):
            ds_unmanaged_gas.accumulation(self.engine).grad_norm()

    def save(self) -> None:
        self.engine.save_checkpoint(self.folder, tag="soak")
        self.reference.save()

    def load(self) -> None:
        self.engine.load_checkpoint(self.folder, tag="soak", load_optimizer_states=True)
        self.reference.load()

    def window(self) -> None:
        """One window, ended by a step() that is applied."""
        kept: list[dict[str, int]] = []
        events = {
            "dropped": (6, self.engine.zero_grad, True),
            "exception in forward": (5, self.fail_in_forward, False),
            "exception in backward": (6, self.fail_in_backward, True),
            "exception in step": (4, self.fail_in_step, True),
            "read": (15, self.read, False),
            "saved": (4, self.save, False),
            "loaded": (5, self.load, True),
        }
        for _ in range(self.random.choice([0, 1, 1, 2, 3, 5])):
            kept.append(self.micro_batch())
            self.backward(kept[-1])
            for name, (percent, action, drops) in events.items():
                if not self.chance(percent) or (name == "loaded" and not self.loads):
                    continue
                self.counts[name] += 1
                action()
                if drops:
                    kept.clear()
        self.engine.step()
        self.reference.step(kept)
        self.counts["empty windows" if not kept else "windows"] += 1


def soak(
    config: dict[str, Any], seed: int, folder: str, loads: bool, num_windows: int
) -> dict[str, Any]:
    run = Soak(config, seed, folder, loads)
    run.save()
    wrong = []
    for number in range(num_windows):
        run.window()
        if full_weights(run.engine) != weights_of(run.reference.model):
            wrong.append(number)
    run.engine.destroy()
    return {"wrong": wrong, "counts": dict(run.counts)}


# Other ways through the reduction: in place, by hooks of a boundary backward, in other buckets.
ZERO_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "small buckets": {"reduce_bucket_size": 16, "sub_group_size": 1},
    "apart, overlap": {"contiguous_gradients": False, "overlap_comm": True},
    "no scatter": {"reduce_scatter": False, "reduce_bucket_size": 40},
}


@pytest.mark.parametrize(
    "zero",
    [
        pytest.param(zero, id=name, marks=[pytest.mark.thorough] if zero else [])
        for name, zero in ZERO_OPTIONS.items()
    ],
)
@pytest.mark.parametrize(
    ("stage", "offload", "options"),
    [
        *(pytest.param(*mode.values, {}, id=mode.id) for mode in MODES),
        *(
            pytest.param(*mode.values, REDUCED_AT_STEP, id=f"{mode.id}-at step")
            for mode in PARTITIONED_MODES
        ),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "accum_dtype"),
    [pytest.param("fp32", None, marks=pytest.mark.thorough), ("bf16", "fp32")],
)
def test_random_windows(
    ranks: RankPool,
    tmp_path: Any,
    stage: int,
    offload: bool,
    options: dict[str, Any],
    dtype: str,
    accum_dtype: str | None,
    zero: dict[str, Any],
) -> None:
    if stage == 0 and zero:
        pytest.skip("stage 0 has none of these options")
    config = mode_config(stage, offload, dtype=dtype, accum_dtype=accum_dtype, zero=zero, **options)
    reports = ranks.run(
        soak,
        config=config,
        seed=SEED,
        folder=str(tmp_path),
        loads=not uses_fp16_optimizer(stage, dtype, accum_dtype),
        num_windows=NUM_WINDOWS,
        timeout=120 + 2 * NUM_WINDOWS,
    )
    mode = f"{stage}{' offload' if offload else ''}{' at step' if options else ''}"
    print(f"\n{mode} {dtype}: {reports[0]['counts']}", end="")
    for report in reports:
        assert report["wrong"] == []
