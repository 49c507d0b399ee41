"""transformers.Trainer on unmanaged engines: windows of four micro-batches and an epoch's tail,
losses divided by the tokens of all ranks in a window, a clipped norm, a learning rate schedule."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.huggingface import reset_accelerate, tiny_llama
from harness.model import Weights, weights_of
from harness.pool import RanksFailed
from harness.releases import between
from harness.training import full_weights, make_config
from transformers import Trainer, TrainingArguments

import ds_unmanaged_gas

GAS = 4
WORLD_SIZE = 2
MICRO_BATCH = 2
NUM_MICRO_BATCHES = 2 * GAS + 1  # per rank and epoch
NUM_EPOCHS = 2
STEPS_PER_EPOCH = 3
LEARNING_RATE = 0.5
MAX_GRAD_NORM = 0.6
"""Some windows are clipped by it and some are not."""

LENGTH = 6
VOCABULARY = 16

# Of weights around 0.1 and updates of up to 0.1, all in fp32: the sums over tokens, micro-batches
# and ranks are added up in another order, and the norm that clips them too.
CLOSE = {"rel": 1e-4, "abs": 1e-6}


def make_model() -> Any:
    return tiny_llama(vocabulary=VOCABULARY, length=LENGTH)


def make_data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(MICRO_BATCH * WORLD_SIZE * NUM_MICRO_BATCHES):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: index % (LENGTH - 1)] = -100  # one to five tokens that count
        rows.append({"input_ids": ids, "labels": labels})
    return rows


class InOrder(Trainer):
    """Doesn't shuffle, so that the reference knows which rank gets what."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train(config: dict[str, Any] | None = None, *, by_tokens: bool = True) -> dict[str, Any]:
    """Train with Trainer; without a ds_config it runs DDP."""
    reset_accelerate()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=config is None,
            deepspeed=config,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=GAS,
            num_train_epochs=NUM_EPOCHS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="linear",
            optim="sgd",
            max_grad_norm=MAX_GRAD_NORM,
            average_tokens_across_devices=True,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = InOrder(model=make_model(), args=arguments, train_dataset=make_data())
        if not by_tokens:
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    engine = trainer.model_wrapped
    result = {
        "weights": full_weights(engine) if config else weights_of(engine.module),
        "norms": [float(entry["grad_norm"]) for entry in logs],
        "rates": [entry["learning_rate"] for entry in logs],
        "losses": [entry["loss"] for entry in logs],
    }
    if config:
        result["steps"] = engine.global_steps
        result["unmanaged"] = ds_unmanaged_gas.is_unmanaged(engine)
        engine.destroy()
    return result


def windows() -> Iterator[list[dict[str, torch.Tensor]]]:
    """The micro-batches of all ranks in each window: DataLoaders deal them out in turn."""
    rows = make_data()
    batches = [
        {key: torch.stack([row[key] for row in rows[i : i + MICRO_BATCH]]) for key in rows[0]}
        for i in range(0, len(rows), MICRO_BATCH)
    ]
    for start in range(0, len(batches), GAS * WORLD_SIZE):
        yield batches[start : start + GAS * WORLD_SIZE]


def reference(*, by_tokens: bool = True) -> tuple[Weights, list[float]]:
    """Plain PyTorch on the data of both ranks. Returns the weights and each step's norm."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    num_steps = NUM_EPOCHS * STEPS_PER_EPOCH
    norms = []
    for step, window in enumerate(w for _ in range(NUM_EPOCHS) for w in windows()):
        optimizer.zero_grad()
        num_tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
        for batch in window:
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
            targets = batch["labels"][:, 1:].flatten()
            if by_tokens:
                loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
                (loss / num_tokens).backward()
            else:
                loss = torch.nn.functional.cross_entropy(logits, targets)
                (loss / len(window)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        norms.append(float(norm))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / num_steps)
        optimizer.step()
    return weights_of(model), norms


def flat(weights: Weights) -> list[float]:
    return torch.cat([torch.tensor(weights[name]).flatten() for name in sorted(weights)]).tolist()


def trainer_config(stage: int, **options: Any) -> dict[str, Any]:
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
    return make_config(stage=stage, **options) | auto | {"gradient_accumulation_steps": "auto"}


@pytest.mark.parametrize("by_tokens", [True, False], ids=["tokens", "micro-batches"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trainer_trains_as_without_deepspeed(ranks: Any, stage: int, by_tokens: bool) -> None:
    weights, norms = reference(by_tokens=by_tokens)
    assert min(norms) < MAX_GRAD_NORM < max(norms)
    plain = ranks.run(train, plugin=False, by_tokens=by_tokens)
    results = ranks.run(train, config=trainer_config(stage), by_tokens=by_tokens)
    for result, alone in zip(results, plain):
        assert result["unmanaged"]
        assert result["steps"] == NUM_EPOCHS * STEPS_PER_EPOCH
        assert result["rates"] == alone["rates"]
        assert flat(result["weights"]) == pytest.approx(flat(weights), **CLOSE)
        assert flat(alone["weights"]) == pytest.approx(flat(weights), **CLOSE)
        assert result["norms"] == pytest.approx(norms, **CLOSE)
        assert result["losses"] == pytest.approx(alone["losses"], **CLOSE)


@pytest.mark.parametrize("stage", [2, 3])
def test_managed_engines_run_stock_code(ranks: Any, stage: int) -> None:
    config = trainer_config(stage, unmanaged=False)
    assert ranks.run(train, config=config) == ranks.run(train, config=config, plugin=False)


def test_without_the_plugin_the_flag_can_not_be_used_control(ranks: Any) -> None:
    if not between("0.19.4"):
        pytest.skip("this DeepSpeed has no such mode")
    with pytest.raises(RanksFailed, match="set_gradient_accumulation_boundary"):
        ranks.run(train, config=trainer_config(2), plugin=False)


def test_a_second_division_is_refused(ranks: Any) -> None:
    block = {"gradient_scale": "num_backwards"}
    with pytest.raises(RanksFailed, match="would divide once more"):
        ranks.run(train, config=trainer_config(2, unmanaged_gradient_accumulation=block))
