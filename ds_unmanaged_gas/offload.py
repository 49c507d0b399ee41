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

    [Note: who may touch host memory, and when]
    Targets and spares are pinned where the user has asked for it, and then a copy between them and
    the device is late: it belongs to the stream that it was given to. From a window's first add()
    on they belong to the stream of the last add(), which waits for that of the one before, should
    it be another: add() reads and writes them there only. With finalize() they become the host's,
    and so they stay until the next window's first add(): it reads one number from the device, on a
    stream that waits for that of the copies, so that all of them have arrived. Whatever the host
    does to them (fill, zero, divide, the optimizer's step) comes after that or after wait(). What
    stock code copies at stage 1, which reduces at step(), the host doesn't touch at all: it is
    divided on the device.
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
        # That of the copies that the host has not waited for; None if it has.
        self._stream: Any = None
        self.has_overflow = False
        """Whether a sum of the last finalize() was not finite."""

    def add(self, key: int, grad: torch.Tensor) -> None:
        """Add one contribution, flat, as long as the target or shorter. The host does not wait for
        the copies."""
        self.follow_stream()
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
                # Two calls: one that converts as well reads the host's memory at once on some back
                # ends, when what it reads may not have arrived.
                total = held.to(grad.device, non_blocking=True).to(self._dtype).add_(grad)
                into.copy_(total, non_blocking=True)
        self._seen.add(key)
        # Once per window would do, but only here the sum is on the device.
        self._norms[key] = None if total.device == target.device else _norm_of(total)

    def mark(self, key: int) -> None:
        """Note a contribution that stock code keeps, and hands over itself."""
        self._seen.add(key)

    def follow_stream(self) -> None:
        """Order the copies of this call after earlier ones. See [Note: who may touch host memory,
        and when]."""
        if get_accelerator().is_synchronized_device():
            return
        stream = get_accelerator().current_stream()
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def wait(self) -> None:
        """Let the host wait for the copies."""
        if self._stream is not None:
            self._stream.synchronize()
            self._stream = None

    def finalize(self) -> dict[int, torch.Tensor]:
        """Make every target this window's sum: from its spare, or zero where there was no
        contribution. Returns the norms of the sums. Host work only, after one wait for the device.
        """
        # See [Note: who may touch host memory, and when]
        absent = self._dirty - self._seen
        if self._stream is not None and self._norms:
            order(self._stream, get_accelerator().current_stream())
            self.has_overflow = not all_finite([n for n in self._norms.values() if n is not None])
            self._stream = None
        elif absent:
            self.wait()
        on_host = {key: _norm_of(self._sum(key)) for key, n in self._norms.items() if n is None}
        norms = {key: on_host[key] if n is None else n for key, n in self._norms.items()}
        if on_host:
            self.has_overflow = not all_finite(list(on_host.values()))
        for key in self._in_spare:
            self._target(key).copy_(self._spare(key))
        for key in absent:
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
        self.has_overflow = False


def order(earlier: Any, later: Any) -> None:
    """Let one stream wait for what another one was given so far. The host doesn't wait."""
    if not get_accelerator().resolves_data_dependency() and earlier != later:
        later.wait_stream(earlier)


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
