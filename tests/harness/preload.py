"""Imported once, by the process that the ranks are forked from."""

from __future__ import annotations

import ds_unmanaged_gas.engine  # noqa: F401
import harness.training  # noqa: F401
