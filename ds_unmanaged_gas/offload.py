"""Gradients of an offloaded optimizer: one window's sums, kept where the optimizer reads them.

Shared by the stage 2 and stage 3 paths. Stage 1 needs none of it: it reduces once, at step().
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

Place = Callable[[int], torch.Tensor]
"""Parameter key -> this rank's flat part of a buffer."""


class HostSums:
    """Sums one window's gradient partitions in host memory, per parameter.

    [Note: where an offloaded gradient waits]
    The optimizer owns a persistent gradient buffer on the host that its step reads (the ``target``:
    fp32 unless low-precision masters are configured). A parameter's first contribution goes there
    at once, so a window of one backward costs one copy and no other buffer. A later one is added on
    the device, in the accumulation dtype, and goes back to the target if that is its dtype, else to
    a ``spare`` of that dtype, from which finalize() fills the target. Nothing clears either between
    windows; what decides is what this window has seen of each parameter.
    See [Note: I2, per-parameter participation].
    """

    def __init__(self, dtype: torch.dtype, target: Place, spare: Place) -> None:
        self._dtype = dtype
        self._target = target
        self._spare = spare
        # Contributed in this window. Cleared by forget().
        self._seen: set[int] = set()
        # Of these, the ones whose sum is in the spare. Cleared by forget().
        self._in_spare: set[int] = set()
        # Contributed in an earlier window, and their target was not zeroed since.
        self._dirty: set[int] = set()
        # The 2-norm of each sum so far, 0-dim, on the device; None where the sum can be looked at
        # in finalize(), without moving it. Cleared by forget().
        self._norms: dict[int, torch.Tensor | None] = {}

    def add(self, key: int, grad: torch.Tensor) -> None:
        """Add one contribution, flat, as long as the target or shorter. Does not wait for the
        copies."""
        target = self._target(key).narrow(0, 0, grad.numel())
        total = grad
        if key not in self._seen:
            target.copy_(grad, non_blocking=True)
        else:
            held = into = target
            if target.dtype != self._dtype:
                into = self._spare(key).narrow(0, 0, grad.numel())
                held = into if key in self._in_spare else target
                self._in_spare.add(key)
            if grad.device == into.device:
                total = torch.add(held, grad, out=into)
            else:
                total = held.to(grad.device, self._dtype, non_blocking=True).add_(grad)
                into.copy_(total, non_blocking=True)
        self._seen.add(key)
        # Once per window would do, but only here the sum is on the device.
        self._norms[key] = None if total.device == target.device else _norm_of(total)

    def mark(self, key: int) -> None:
        """Note a contribution that stock code keeps, and hands over itself."""
        self._seen.add(key)

    def finalize(self) -> dict[int, torch.Tensor]:
        """Make every target this window's sum: from its spare, or zero where there was no
        contribution. Returns the norms of the sums. Host work only, after waiting for the copies to
        the host."""
        if not get_accelerator().is_synchronized_device():
            get_accelerator().synchronize()
        norms = {
            key: _norm_of(self._sum(key)) if norm is None else norm
            for key, norm in self._norms.items()
        }
        for key in self._in_spare:
            self._target(key).copy_(self._spare(key))
        for key in self._dirty - self._seen:
            self._target(key).zero_()
        self._dirty.clear()
        return norms

    def _sum(self, key: int) -> torch.Tensor:
        return self._spare(key) if key in self._in_spare else self._target(key)

    def seen(self) -> tuple[int, ...]:
        """The parameters that contributed, in no order."""
        return tuple(self._seen)

    def in_spare(self) -> tuple[int, ...]:
        """The parameters whose sum is in the spare."""
        return tuple(self._in_spare)

    def forget(self) -> None:
        """Drop the window: whatever comes next is a first contribution."""
        self._dirty |= self._seen
        self._seen.clear()
        self._in_spare.clear()
        self._norms.clear()


def all_finite(norms: list[torch.Tensor]) -> bool:
    """Whether all gradients with these norms are finite. One wait for the device."""
    return not norms or bool(torch.stack(norms).isfinite().all())


def divide_norms(optimizer: Any, keys: Iterable[int], divisor: float) -> None:
    """Divide the norms that stock step() adds up instead of looking at the gradients."""
    norms = optimizer.norm_for_param_grads
    for key in keys:
        norms[key] = norms[key] / divisor


def keep_alive(grad: torch.Tensor) -> None:
    """Let the allocator reuse a gradient only after the copies that this stream was given."""
    if not get_accelerator().is_synchronized_device():
        grad.record_stream(get_accelerator().current_stream())


def _norm_of(grad: torch.Tensor) -> torch.Tensor:
    # As stock code takes the norms of offloaded gradients; up to 0.18 it did not ask.
    has_fp64 = getattr(get_accelerator(), "is_fp64_supported", lambda: True)
    dtype = torch.float64 if has_fp64() else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(grad, dtype=dtype)
    return norm
