"""Accelerate in ranks that are connected already. Imported by the tests in integrations/ only."""

from __future__ import annotations

import os
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState


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
