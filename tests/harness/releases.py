"""What the installed DeepSpeed can do, for tests that have to know."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

DEEPSPEED = Version(version("deepspeed"))


def skip_if_stock_rejects(stage: int, dtype: str, accum_dtype: str | None) -> None:
    """Skip combinations that DeepSpeed itself has no code for, managed or not."""
    is_mixed = dtype != "fp32" and accum_dtype == "fp32"
    accepts_mixed = dtype == "bf16" and Version("0.18.5") > DEEPSPEED
    if stage == 0 and is_mixed and not accepts_mixed:
        pytest.skip(f"DeepSpeed {DEEPSPEED} rejects {dtype} with fp32 accumulation at stage 0")


def skip_without_torch_style(stage: int, dtype: str, accum_dtype: str | None) -> None:
    """Skip where DeepSpeed refuses loss.backward() for want of a ZeRO optimizer."""
    if stage == 1 and (dtype, accum_dtype) == ("bf16", "fp32") and Version("0.18.5") > DEEPSPEED:
        pytest.skip(f"DeepSpeed {DEEPSPEED} has no ZeRO-1 optimizer for bf16 summed in fp32")
