"""Imported once, by the process that the ranks are forked from."""

from __future__ import annotations

import contextlib
import importlib

import ds_unmanaged_gas.engine  # noqa: F401
import harness.training  # noqa: F401

# What the first engine of a process would import, for ten seconds: torch's compiler, by way of a
# decorator in a module that the oldest releases lack.
for name in (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "deepspeed.runtime.zero.muon.muon_optimizer",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
