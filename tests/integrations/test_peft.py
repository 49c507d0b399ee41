"""LoRA adapters of peft on unmanaged engines: frozen weights beside trained ones."""

from __future__ import annotations

from typing import Any

import deepspeed
import peft
import pytest
import torch
from harness.huggingface import tiny_llama
from harness.model import Weights, weights_of
from harness.training import full_weights, make_config, make_engine

WINDOWS = [[1, 2, 3], [4], [5, 6]]
"""Seeds of the micro-batches."""

LEARNING_RATE = 0.5
LENGTH, VOCABULARY = 5, 16


def make_model() -> Any:
    model = tiny_llama(vocabulary=VOCABULARY, length=LENGTH)
    # Not zeros for either factor, as peft has it: else some gradients would be zero at first.
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        ),
    )


def make_optimizer(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def batch(seed: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def trained(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in weights.items() if "lora" in name}


def reference() -> list[Weights]:
    """Plain PyTorch on the data of both ranks."""
    model = make_model()
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    history = []
    for window in WINDOWS:
        optimizer.zero_grad()
        for seed in window:
            for rank in range(2):
                (model(**batch(seed, rank)).loss / 2).backward()
        optimizer.step()
        history.append(weights_of(model))
    return history


def train(config: dict[str, Any]) -> list[Weights]:
    engine = make_engine(config, model=make_model(), optimizer=make_optimizer)
    history = []
    for window in WINDOWS:
        for seed in window:
            loss = engine(**batch(seed, deepspeed.comm.get_rank())).loss
            engine.backward(loss, scale_wrt_gas=False)
        engine.step()
        history.append(full_weights(engine))
    engine.destroy()
    return history


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's, of itself
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adapters_accumulate_as_in_plain_pytorch(ranks: Any, stage: int) -> None:
    expected = [trained(weights) for weights in reference()]
    start = trained(weights_of(make_model()))
    assert len(start) == 4
    for name in start:  # or the tolerance below could hide a missing update
        assert (expected[-1][name] - start[name]).abs().max() > 0.001
    for history in ranks.run(train, config=make_config(stage=stage)):
        for weights, wanted in zip(history, expected, strict=True):
            for name, values in trained(weights).items():
                # fp32 sums over ranks and micro-batches in another order.
                torch.testing.assert_close(values, wanted[name], rtol=1e-5, atol=1e-6)
