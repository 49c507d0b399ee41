"""What the engine trains: several independently trainable models ("slots") in one module.

With ``lora_rank`` 0 a slot is a copy of the whole base model, else a LoRA adapter of one frozen
base model. Clients come and go, slots stay: a new client's model is a slot with fresh weights.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

LORA_ALPHA = 32


def make_base(path: str | None) -> Any:
    """The base model in fp32: from a local folder, or a tiny one with random weights, the same ones
    at every call."""
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=torch.float32
        )
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


class Slots(nn.Module):
    def __init__(self, path: str | None, count: int, lora_rank: int) -> None:
        super().__init__()
        self.path, self.count, self.lora_rank = path, count, lora_rank
        base = make_base(path)
        if lora_rank == 0:
            self.models = nn.ModuleList([base, *(copy.deepcopy(base) for _ in range(count - 1))])
        else:
            self.lora = _with_adapters(base, count, lora_rank)
        self._trainable = [p for p in self.parameters() if p.requires_grad]
        # No dropout: a micro-batch that is run again has to give the same gradient.
        self.eval()

    def forward(
        self, slot: int, tokens: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """The log-probability of every target, in fp32."""
        if self.lora_rank == 0:
            model = self.models[slot]
        else:
            model = self.lora
            model.set_adapter(_adapter(slot))
            # peft freezes the other adapters. They just take no part in this micro-batch.
            for param in self._trainable:
                param.requires_grad_(True)
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.float()
        scores = functional.log_softmax(logits, dim=-1)
        return scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def base_config(self) -> Any:
        """The configuration of the base model."""
        return self.models[0].config if self.lora_rank == 0 else self.lora.config

    def parameters_of(self, slot: int) -> dict[str, nn.Parameter]:
        """The trainable parameters of a slot, by names that are the same for every slot."""
        if self.lora_rank == 0:
            return dict(self.models[slot].named_parameters())
        part = f".{_adapter(slot)}."
        return {n.replace(part, "."): p for n, p in self.lora.named_parameters() if part in n}

    def fresh_weights(self, seed: int) -> dict[str, torch.Tensor]:
        """What a new model starts with: the base model's weights, or an adapter that changes
        nothing yet (A random by ``seed``, B zero)."""
        if self.lora_rank == 0:
            return {n: p.detach() for n, p in make_base(self.path).named_parameters()}
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, param in self.parameters_of(0).items():
            weights[name] = torch.zeros(getattr(param, "ds_shape", param.shape))
            if "lora_A" in name:
                bound = 1 / math.sqrt(weights[name].shape[1])
                weights[name].uniform_(-bound, bound, generator=generator)
        return weights


def _adapter(slot: int) -> str:
    return f"slot{slot}"


def _with_adapters(base: Any, count: int, lora_rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    layers = [name for name, module in base.named_modules() if isinstance(module, nn.Linear)]

    def config() -> Any:
        return LoraConfig(r=lora_rank, lora_alpha=LORA_ALPHA, target_modules=layers)

    model = get_peft_model(base, config(), adapter_name=_adapter(0))
    for slot in range(1, count):
        model.add_adapter(_adapter(slot), config())
    for name, param in model.named_parameters():
        param.requires_grad_(".slot" in name)
    return model
