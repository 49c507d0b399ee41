"""What the installed DeepSpeed can do, for tests that have to know."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

DEEPSPEED = Version(version("deepspeed"))


def between(first: str, last: str | None = None) -> bool:
    """Whether the installed release is one of these. Without ``last``: or a later one."""
    return Version(first) <= DEEPSPEED and (last is None or Version(last) >= DEEPSPEED)


STAGE2_KEEPS_THE_LAST_ONLY = between("0.17.6", "0.18.2")
"""Managed mode keeps the gradients of the last backward only; so it is no witness there."""


def skip_if_stock_rejects(config: dict[str, Any]) -> None:
    """Skip ds_configs that DeepSpeed itself has no code for, managed or not."""
    if config["zero_optimization"]["stage"] != 0:
        return
    dtype = "bf16" if "bf16" in config else "fp16" if "fp16" in config else "fp32"
    accum_dtype = config.get("data_types", {}).get("grad_accum_dtype")
    accepted = {
        ("bf16", "bf16"): between("0.17.6"),
        ("bf16", "fp32"): between("0.15.0", "0.18.4"),
        ("fp16", "fp32"): False,
    }
    if not accepted.get((dtype, accum_dtype), True):
        pytest.skip(f"DeepSpeed {DEEPSPEED} rejects {dtype} summed in {accum_dtype} at stage 0")


def uses_fp16_optimizer(stage: int, dtype: str, accum_dtype: str | None) -> bool:
    """Whether a bf16 model summed in fp32 gets DeepSpeed's fp16 optimizer instead of
    BF16_Optimizer: gradients are bf16 when they reach it, and its checkpoints can't be loaded."""
    is_mixed = (dtype, accum_dtype) == ("bf16", "fp32")
    return stage < 2 and is_mixed and between("0.17.6", "0.18.4")


HAS_TORCH_STYLE = Version("0.18.3") <= DEEPSPEED


def skip_without_torch_style(
    stage: int, dtype: str = "fp32", accum_dtype: str | None = None
) -> None:
    """Skip where DeepSpeed can't do loss.backward(), or refuses it for want of a ZeRO optimizer."""
    if not HAS_TORCH_STYLE:
        pytest.skip(f"DeepSpeed {DEEPSPEED} has no loss.backward()")
    if stage == 1 and (dtype, accum_dtype) == ("bf16", "fp32") and Version("0.18.5") > DEEPSPEED:
        pytest.skip(f"DeepSpeed {DEEPSPEED} has no ZeRO-1 optimizer for bf16 summed in fp32")
