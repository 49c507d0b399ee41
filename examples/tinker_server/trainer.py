"""The engine, on every rank. Rank 0 says what to do, all ranks do it, see team.py.

[Note: one window, one slot]
The engine has one accumulation window. The controller sees to it that all backwards in it are of
one slot. The other slots' parameters take no part then, so their gradients are zero, and SlotAdamW
skips them in the update: neither their weights nor their optimizer state notice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

import ds_unmanaged_gas

from .models import Slots
from .team import AgreedError, Team
from .wire import AdamParams, Datum, Work

MOMENTS = ("exp_avg", "exp_avg_sq")


class SlotAdamW(torch.optim.AdamW):
    """AdamW that updates one slot, or all of them while none is chosen. A slot is a param group."""

    active: dict[str, Any] | None = None

    def allocate(self) -> None:
        """Make the state of all parameters, which otherwise the first step() does."""
        for param in (param for group in self.param_groups for param in group["params"]):
            state = {key: torch.zeros_like(param) for key in MOMENTS}
            self.state[param] = {"step": torch.tensor(0.0), **state}

    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        self.param_groups = [g for g in groups if self.active is None or g is self.active]
        try:
            for group in self.param_groups:
                for param in group["params"]:
                    if "step" in self.state[param]:
                        # Kept per slot: at stage 3 DeepSpeed shows parameters only now.
                        self.state[param]["step"].fill_(group["updates"])
            return super().step(closure)
        finally:
            self.param_groups = groups


class Trainer:
    def __init__(
        self, team: Team, *, path: str | None, slots: int, lora_rank: int, stage: int, micro: int
    ) -> None:
        ds_unmanaged_gas.enable()
        self.team = team
        self.micro = micro
        module = Slots(path, slots, lora_rank)
        groups = [
            {"params": list(module.parameters_of(slot).values()), "updates": 0}
            for slot in range(slots)
        ]
        self.optimizer = SlotAdamW(groups, lr=0.0, weight_decay=0.0)
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": micro,
                "gradient_clipping": 0.0,  # every optim_step says its own
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000_000},
                "steps_per_print": 10**9,
                "managed_gradient_accumulation": False,
            },
        )
        self.module = module
        self.window = ds_unmanaged_gas.accumulation(self.engine)
        # DeepSpeed makes the optimizer state accessible after the first step only, and at stages 1
        # and 2 only what exists when the first group is done. So make it, and take a step with zero
        # gradients and a learning rate of zero.
        self.optimizer.allocate()
        self.window.step()

    def run(self, *, slot: int, work: Work, first: int, train: bool) -> dict[str, Any]:
        """Forward, and with ``train`` backward, of this rank's share of a request.

        Datum i is micro-batched on rank (first + i) modulo the number of ranks, ``first`` being the
        number of data before it in its window: so each rank adds the same terms in the same order
        however a window is split into requests. Returns the loss and the log-probabilities by
        datum. Collective: per micro-batch two small all-reduces, and those of backward().
        """
        size, rank = self.team.size, self.team.rank
        shares = [range((r - first) % size, len(work.data), size) for r in range(size)]
        rounds = -(-max(map(len, shares)) // self.micro)
        loss_sum, logprobs = 0.0, {}
        for i in range(rounds):
            mine = shares[rank][i * self.micro : (i + 1) * self.micro]
            data = [work.data[index] for index in mine]
            # ZeRO-2 and 3 communicate in every backward, so a rank without data does one, too.
            data = data or [_without_weight(work.data[0])]
            # A failure on one rank is one on all, before a backward that the others would wait in.
            with self.team.agreement(), torch.set_grad_enabled(train):
                loss, scores = self._forward(slot, data, work)
            with self.team.agreement():
                if train:
                    # DeepSpeed takes the mean over ranks, Tinker's loss is the sum.
                    self.window.backward(loss * size)
            if mine:
                loss_sum += loss.item()
            for index, datum, row in zip(mine, data, scores, strict=False):
                logprobs[index] = row[: len(datum.tokens)].detach().cpu().numpy()
        return {"loss": loss_sum, "logprobs": logprobs, "micro_batches": rounds}

    def _forward(
        self, slot: int, data: list[Datum], work: Work
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the log-probabilities of a micro-batch. Raises for a loss that is not
        finite."""
        length = max(len(datum.tokens) for datum in data)
        device = self.engine.device
        tokens = _padded([d.tokens for d in data], length, device)
        targets = _padded([d.targets for d in data], length, device)
        mask = _padded([np.ones_like(d.tokens) for d in data], length, device)
        inputs = {
            name: _padded([d.inputs[name] for d in data], length, device) for name in data[0].inputs
        }
        logprobs = self.engine(slot, tokens, mask, targets)
        loss = loss_of(work.loss_fn, work.config, logprobs, inputs)
        if not torch.isfinite(loss):
            raise AgreedError(f"the {work.loss_fn} loss of a micro-batch is {loss.item()}")
        return loss, logprobs

    def grad_norm(self) -> float:
        """The norm of the gradients in the engine's window."""
        return self.window.grad_norm()

    def step(self, *, slot: int, adam: AdamParams) -> None:
        """Apply the engine's window to this slot."""
        group = self.optimizer.param_groups[slot]
        group.update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        self.optimizer.active = group
        self.window.step(max_grad_norm=adam.grad_clip_norm)
        group["updates"] += 1

    def discard(self) -> None:
        """Drop the engine's window."""
        self.window.discard()

    def reset(self, *, slot: int, seed: int) -> None:
        """Give a slot fresh weights and a fresh optimizer."""
        self._set(slot, self.module.fresh_weights(seed), {}, updates=0)

    def save(self, *, slot: int, path: str) -> None:
        """Write a slot's weights and optimizer state, at once or not at all."""
        parameters = self.module.parameters_of(slot)
        state: dict[str, Any] = {
            "lora_rank": self.module.lora_rank,
            "updates": self.optimizer.param_groups[slot]["updates"],
            "weights": {n: safe_get_full_fp32_param(p).cpu() for n, p in parameters.items()},
        }
        for key in MOMENTS:
            state[key] = {
                n: safe_get_full_optimizer_state(p, key).cpu() for n, p in parameters.items()
            }
        if self.team.rank == 0:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, f"{path}.unfinished")
            os.replace(f"{path}.unfinished", path)

    def load(self, *, slot: int, path: str, optimizer: bool) -> None:
        """Read what save() wrote, with or without the optimizer state."""
        state = torch.load(path, weights_only=True)
        if state["lora_rank"] != self.module.lora_rank:
            raise AgreedError(
                f"saved with LoRA rank {state['lora_rank']}, but this server trains rank "
                f"{self.module.lora_rank} (0: all parameters)"
            )
        moments = {key: state[key] for key in MOMENTS} if optimizer else {}
        self._set(slot, state["weights"], moments, state["updates"] if optimizer else 0)

    def _set(
        self,
        slot: int,
        weights: dict[str, torch.Tensor],
        moments: dict[str, dict[str, torch.Tensor]],
        updates: int,
    ) -> None:
        for name, param in self.module.parameters_of(slot).items():
            value = weights[name].to(self.engine.device)
            with torch.no_grad(), deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                param.copy_(value)  # what forward reads
            safe_set_full_fp32_param(param, value)  # what the optimizer updates
            for key in MOMENTS:
                moment = moments.get(key, {}).get(name, torch.zeros_like(value))
                safe_set_full_optimizer_state(param, moment.to(value), key)
        self.optimizer.param_groups[slot]["updates"] = updates


def loss_of(
    name: str,
    config: dict[str, float],
    logprobs: torch.Tensor,
    inputs: dict[str, torch.Tensor],
) -> torch.Tensor:
    """The sum over tokens. Padding has weight or advantage zero."""
    if name == "cross_entropy":
        return -(inputs["weights"] * logprobs).sum()
    ratio = torch.exp(logprobs - inputs["logprobs"])
    gain = ratio * inputs["advantages"]
    if name == "ppo":
        low, high = config["clip_low_threshold"], config["clip_high_threshold"]
        gain = torch.minimum(gain, ratio.clamp(low, high) * inputs["advantages"])
    return -gain.sum()


def _padded(arrays: list[np.ndarray], length: int, device: Any) -> torch.Tensor:
    rows = [np.pad(array, (0, length - len(array))) for array in arrays]
    return torch.from_numpy(np.stack(rows)).to(device)


def _without_weight(datum: Datum) -> Datum:
    """One token that contributes exactly nothing to the loss and to the gradient."""
    nothing = np.zeros(1, np.float32)
    return Datum(datum.tokens[:1], datum.targets[:1], dict.fromkeys(datum.inputs, nothing))
