"""Accelerate in ranks that are connected already. Imported by the tests in integrations/ only."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(*, vocabulary: int, length: int) -> LlamaForCausalLM:
    """One layer of width 8, with the same random weights whenever it is called."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=length,
            attn_implementation="eager",
            initializer_range=0.1,
        )
    )


def reset_accelerate() -> None:
    """Let the next Accelerator of this process start afresh: its state is global."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    # Asked for, but not used: the ranks are connected already.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    if PartialState._prepare_backend is not _prepare_backend:
        PartialState._prepare_backend = _prepare_backend


_stock_prepare_backend = PartialState._prepare_backend


def _prepare_backend(state: Any, *args: Any, **kwargs: Any) -> Any:
    # CPU only: with DeepSpeed Accelerate knows backends of accelerators, and takes two ranks for
    # two unrelated processes without one.
    backend, distributed_type = _stock_prepare_backend(state, *args, **kwargs)
    return backend or "gloo", distributed_type
