"""Gradients of an offloaded optimizer: one window's sums, kept where the optimizer reads them.

Shared by the stage 2 and stage 3 paths. Stage 1 needs none of it: it reduces once, at step().
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
    it be another: add() reads and writes them there only. Whatever the host does to them (fill,
    zero, divide) comes after wait_for_copies(). Before the optimizer reads them the host has read a
    number that the device computes after the copies, the norm or the overflow flag, as in managed
    mode. What stock code copies at stage 1, which reduces at step(), the host doesn't touch at all:
    it is divided on the device.
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
        # That of the copies that the host has not waited for, and a point in it behind the last of
        # them; None if it has.
        self._stream: Any = None
        self._copied: Any = None

    def add(self, contributions: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Add one contribution of each of these parameters, flat, as long as its target or shorter.
        The host does not wait for the copies."""
        on_device: dict[int, torch.Tensor] = {}
        with self.copying():
            for key, grad in contributions:
                total = self._add(key, grad)
                self._norms[key] = None
                if total.device != self._target(key).device:
                    on_device[key] = total
        if on_device:
            # Once per window would do, but only here the sums are on the device.
            self._norms.update(zip(on_device, _norms_of_sums(list(on_device.values()))))

    def _add(self, key: int, grad: torch.Tensor) -> torch.Tensor:
        """Add one contribution. Returns the sum."""
        target = self._target(key).narrow(0, 0, grad.numel())
        if key not in self._seen:
            self._seen.add(key)
            target.copy_(grad, non_blocking=True)
            return grad
        held = into = target
        if target.dtype != self._dtype:
            into = self._spare(key).narrow(0, 0, grad.numel())
            held = into if key in self._in_spare else target
            self._in_spare.add(key)
        if grad.device == into.device:
            return torch.add(held, grad, out=into)
        # Two calls: one that converts as well reads the host's memory at once on some back ends,
        # when what it reads may not have arrived.
        total = held.to(grad.device, non_blocking=True).to(self._dtype).add_(grad)
        into.copy_(total, non_blocking=True)
        return total

    def mark(self, key: int) -> None:
        """Note a contribution that stock code keeps, and hands over itself."""
        self._seen.add(key)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Surround copies to the host, and order them after earlier ones. See [Note: who may touch
        host memory, and when]."""
        accelerator = get_accelerator()
        if accelerator.is_synchronized_device():
            yield
            return
        stream = accelerator.current_stream()
        if self._stream is not None:
            order(self._stream, stream)
        self._stream = stream
        try:
            yield
        finally:
            if self._copied is None:
                self._copied = accelerator.Event()
            self._copied.record(stream)

    def wait_for_copies(self) -> None:
        """Let the host wait for the copies, if they are still under way."""
        # An event that has happened is ordered before the host, as a wait for it would be.
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        self._stream = self._copied = None

    def norms(self) -> dict[int, torch.Tensor]:
        """The 2-norm of each parameter's sum, for the current stream. The host does not wait."""
        if self._stream is not None:
            order(self._stream, get_accelerator().current_stream())
        return {
            key: _norms_of_sums([self._sum(key)])[0] if norm is None else norm
            for key, norm in self._norms.items()
        }

    def finalize(self) -> None:
        """Make every target this window's sum: from its spare, or zero where there was no
        contribution. Host work only; if there is any it waits for the copies to the host."""
        # See [Note: who may touch host memory, and when]
        absent = self._dirty - self._seen
        if absent or self._in_spare:
            self.wait_for_copies()
        for key in self._in_spare:
            self._target(key).copy_(self._spare(key))
        for key in absent:
            self._target(key).zero_()
        self._dirty.clear()

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


def norms_of(grads: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Their 2-norms, 0-dim, by few kernels."""
    if not grads:
        return []
    if _FOREACH_NORM_TAKES_DTYPE:
        return list(torch._foreach_norm(grads, 2, dtype))
    return [torch.linalg.vector_norm(grad, dtype=dtype) for grad in grads]


def _norms_of_sums(sums: list[torch.Tensor]) -> list[torch.Tensor]:
    """As stock code takes the norms of offloaded gradients; up to 0.18 it did not ask."""
    has_fp64 = getattr(get_accelerator(), "is_fp64_supported", lambda: True)
    return norms_of(sums, torch.float64 if has_fp64() else torch.float32)


def _foreach_norm_takes_dtype() -> bool:
    try:
        torch._foreach_norm([torch.zeros(1)], 2, torch.float64)
    except TypeError:
        return False
    return True


_FOREACH_NORM_TAKES_DTYPE = _foreach_norm_takes_dtype()
"""Not in every torch that the oldest releases of DeepSpeed work with."""
