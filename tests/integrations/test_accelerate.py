"""Accelerate's own loop, `accelerator.accumulate()`, on engines that it steps itself.

Losses are linear in the weights and the data small integers, so gradients depend on the data only
and all arithmetic is exact in binary: results are compared with ``==``.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DeepSpeedPlugin, GradientAccumulationPlugin
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from harness.huggingface import reset_accelerate
from harness.model import LEARNING_RATE, Weights, weights_of
from harness.pool import RanksFailed
from harness.releases import between
from harness.training import STAGES, full_weights, make_config
from packaging.version import Version

import ds_unmanaged_gas

GAS = 4
WORLD_SIZE = 2
MICRO_BATCH = 2
# Per rank: four micro-batches, and one more: the tail of an epoch.
NUM_MICRO_BATCHES = GAS + 1
NUM_EPOCHS = 2

ACCELERATE = Version(accelerate.__version__)
SETS_BOUNDARY = Version("1.8.0") <= ACCELERATE
"""Accelerate sets the boundary of managed engines; before, it leaves it to DeepSpeed's counter."""

RETURNS_NORM = hasattr(DeepSpeedEngineWrapper, "get_global_grad_norm")
"""clip_grad_norm_() returns the norm of an engine; before, nothing."""


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return MICRO_BATCH * WORLD_SIZE * NUM_MICRO_BATCHES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randint(-2, 3, (6,), generator=generator)
        t = torch.randint(0, 2, (4,), generator=generator) * 2 - 1
        return {"x": x.float(), "t": t.float()}


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * t).sum()


def reference(divisors: tuple[int, int] = (GAS, GAS)) -> list[Weights]:
    """Plain PyTorch: each epoch is a full window and a tail, whose losses are divided by these.
    Accelerate deals the batches out to the ranks in turn."""
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    history = []
    for _ in range(NUM_EPOCHS):
        batches = list(torch.utils.data.DataLoader(Data(), batch_size=MICRO_BATCH))
        full = GAS * WORLD_SIZE
        for window, divisor in zip([batches[:full], batches[full:]], divisors):
            optimizer.zero_grad()
            for batch in window:
                (model(**batch) / divisor / WORLD_SIZE).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] /= 2
            history.append(weights_of(model))
    return history


def make_accelerator(config: dict[str, Any] | None, **options: Any) -> Any:
    reset_accelerate()
    if config is None:
        return accelerate.Accelerator(cpu=True, **options)
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    return accelerate.Accelerator(deepspeed_plugin=plugin, **options)


def loop(config: dict[str, Any] | None = None, *, sync_each_batch: bool = False) -> dict[str, Any]:
    """The loop of Accelerate's documentation. Without a ds_config it runs DDP."""
    windows = GradientAccumulationPlugin(num_steps=GAS, sync_each_batch=sync_each_batch)
    accelerator = make_accelerator(config, gradient_accumulation_plugin=windows)
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    # Accelerate's scheduler counts a step of each rank.
    halve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // WORLD_SIZE))
    loader = torch.utils.data.DataLoader(Data(), batch_size=MICRO_BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, halve)
    weights, norms, rates = [], [], []
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch))
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e9))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                weights.append(full_weights(model) if config else weights_of(model.module))
                rates.append(scheduler.get_last_lr())
    result = {"weights": weights, "norms": [float(n or 0) for n in norms], "rates": rates}
    if config:
        result |= {"steps": model.global_steps, "unmanaged": ds_unmanaged_gas.is_unmanaged(model)}
        model.destroy()
    return result


@pytest.mark.parametrize("stage", STAGES)
def test_accumulate_steps_at_the_ends_of_windows_and_of_epochs(ranks: Any, stage: int) -> None:
    plain = ranks.run(loop, plugin=False)
    results = ranks.run(loop, config=make_config(stage=stage, gas=GAS))
    for result, alone in zip(results, plain):
        assert result["unmanaged"]
        assert result["steps"] == 2 * NUM_EPOCHS
        assert result["weights"] == reference() == alone["weights"]
        assert result["rates"] == alone["rates"]
        if RETURNS_NORM:
            # Both are fp32 square roots of sums that may be added up in another order.
            assert result["norms"] == pytest.approx(alone["norms"], rel=1e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_window_can_be_divided_by_its_own_backwards(ranks: Any, stage: int) -> None:
    """With Accelerate alone the tail of an epoch is divided by gradient_accumulation_steps too."""
    block = {"gradient_scale": "num_backwards"}
    config = make_config(stage=stage, gas=GAS, unmanaged_gradient_accumulation=block)
    for result in ranks.run(loop, config=config):
        assert result["weights"] == reference(divisors=(GAS, 1))


@pytest.mark.parametrize("stage", STAGES)
def test_managed_engines_run_stock_code(ranks: Any, stage: int) -> None:
    # Older releases of Accelerate call step() in engine.no_sync(), or no_sync() on stages 2 and 3,
    # both of which DeepSpeed refuses from 0.16 on; not so with sync_each_batch.
    task = {
        "config": make_config(stage=stage, gas=GAS, unmanaged=False),
        "sync_each_batch": Version("1.9.0") > ACCELERATE,
    }
    assert ranks.run(loop, **task) == ranks.run(loop, **task, plugin=False)


def test_without_the_plugin_the_flag_can_not_be_used_control(ranks: Any) -> None:
    config = make_config(stage=2, gas=GAS)
    if not between("0.19.4"):
        pytest.skip("this DeepSpeed has no such mode")
    with pytest.raises(RanksFailed, match=r"set_gradient_accumulation_boundary|no_sync"):
        ranks.run(loop, config=config, plugin=False)


def test_older_releases_lose_the_tail_in_managed_mode_control(ranks: Any) -> None:
    if SETS_BOUNDARY:
        pytest.skip("from 1.8 on Accelerate tells managed engines the boundary")
    config = make_config(stage=1, gas=GAS, unmanaged=False)
    for result in ranks.run(loop, config=config, sync_each_batch=True):
        # Ten micro-batches make two windows of four. The tail of the first epoch is in the second.
        assert result["steps"] == 2
        assert result["weights"][-1] != reference()[-1]


def refused(config: dict[str, Any], **options: Any) -> str:
    """The error of the first backward()."""
    accelerator = make_accelerator(config, gradient_accumulation_steps=options.pop("gas"))
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = torch.utils.data.DataLoader(Data(), batch_size=MICRO_BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # Releases up to 1.6 don't adopt the number of the ds_config.
    accelerator.gradient_accumulation_steps = GAS
    batch = next(iter(loader))
    try:
        accelerator.backward(model(**batch), **options)
    except ds_unmanaged_gas.UnsupportedConfigError as error:
        message = str(error)
    else:
        message = "nothing was refused"
    assert ds_unmanaged_gas.accumulation(model).num_backwards == 0
    assert model.global_steps == 0
    model.destroy()
    return message


def test_two_numbers_of_accumulation_steps_are_refused(ranks: Any) -> None:
    for message in ranks.run(refused, config=make_config(stage=1, gas=2), gas=2):
        assert "Accelerate has gradient_accumulation_steps = 4" in message
        assert '["gradient_accumulation_steps"] = 2; write "auto"' in message


def test_a_loss_that_the_caller_divided_is_not_divided_once_more(ranks: Any) -> None:
    block = {"gradient_scale": "num_backwards"}
    config = make_config(stage=1, gas=GAS, unmanaged_gradient_accumulation=block)
    for message in ranks.run(refused, config=config, gas=GAS, scale_wrt_gas=False):
        assert '"num_backwards" would divide once more' in message


_HOOK = """
import sys
import ds_unmanaged_gas as plugin
import deepspeed

names = ("accelerate", "transformers")
before = [name in sys.modules for name in names]
plugin.enable()
assert [name in sys.modules for name in names] == before

from accelerate import Accelerator
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper as Wrapper

def patched():
    return [p.target for p in plugin.status().patches if p.target.startswith("accelerate")]

ours = vars(Wrapper)["backward"], vars(Accelerator)["no_sync"]
assert all(hasattr(each, "__wrapped__") for each in ours)
assert len(patched()) == 2
plugin.disable()
stock = ours[0].__wrapped__, ours[1].__wrapped__
assert vars(Wrapper)["backward"] is stock[0]
assert vars(Accelerator)["no_sync"] is stock[1]
assert patched() == []
plugin.enable()
assert vars(Wrapper)["backward"].__wrapped__ is stock[0]
assert len(patched()) == 2
plugin.disable()
assert vars(Wrapper)["backward"] is stock[0]
print("imported", *before)
"""

_HOOK_WHILE_DISABLED = """
import ds_unmanaged_gas as plugin
plugin.enable()
plugin.disable()
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper as Wrapper
assert not hasattr(vars(Wrapper)["backward"], "__wrapped__")
plugin.enable()
assert hasattr(vars(Wrapper)["backward"], "__wrapped__")
"""


@pytest.mark.parametrize("code", [_HOOK, _HOOK_WHILE_DISABLED], ids=["enabled", "disabled"])
def test_accelerate_is_patched_when_it_is_imported(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)
