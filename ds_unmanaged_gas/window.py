"""The accumulation window: what was accumulated since the last step(), and whose turn it is.

Pure Python: no torch, no DeepSpeed.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import WindowFailedError


class WindowState(enum.Enum):
    """Whether gradients are waiting for step()."""

    EMPTY = enum.auto()
    """No backward() since the last step(). Left by record_backward()."""

    OPEN = enum.auto()
    """Gradients are waiting for step(). Left by close() and fail()."""

    FAILED = enum.auto()
    """An exception left it half done. Left by close(), which discard() calls."""


class Window:
    """All backwards of one engine between two ``step()`` calls.

    [Note: I1, the boundary is step()]
    DeepSpeed asks one question, "is this a gradient accumulation boundary?", from many places: to
    decide whether to reduce, to copy to the optimizer, to update. The caller owns the answer, so it
    is True exactly while step() runs, and goes back to False however step() ends.

    [Note: I5, no silent partial window]
    An exception in backward() or step() leaves some gradients added and others not, here and in
    buckets, counters and hooks. The window is FAILED then: step() and backward() raise until it is
    dropped, which clears all of that.
    """

    def __init__(self) -> None:
        self.num_backwards = 0
        self.num_items = 0.0
        self.is_boundary = False
        self._failure: str | None = None
        self._cause: BaseException | None = None

    @property
    def state(self) -> WindowState:
        if self._failure is not None:
            return WindowState.FAILED
        return WindowState.OPEN if self.num_backwards else WindowState.EMPTY

    def fail(self, what: str, cause: BaseException | None) -> None:
        """Note that the window is half done: whatever is added or applied now would be wrong. The
        first failure is the one that is told."""
        if self._failure is None:
            self._failure, self._cause = what, cause

    def require_usable(self) -> None:
        """Raise WindowFailedError, caused by the original exception, after fail()."""
        if self._failure is not None:
            raise WindowFailedError(
                f"{self._failure} left this window of {self.num_backwards} complete backwards half "
                "done, and its gradients can't be told apart any more; drop it with "
                "engine.zero_grad(), and repeat its backwards if you want them"
            ) from self._cause

    def record_backward(self, num_items: float = 0.0) -> None:
        self.num_backwards += 1
        self.num_items += num_items

    @contextmanager
    def boundary(self) -> Iterator[None]:
        """Make this the boundary for the duration of the block."""
        # See [Note: I1, the boundary is step()]
        self.is_boundary = True
        try:
            yield
        finally:
            self.is_boundary = False

    def close(self) -> None:
        """Forget the window: its gradients were applied, skipped by an overflow, or dropped."""
        self.num_backwards = 0
        self.num_items = 0.0
        self._failure = self._cause = None


# Every unmanaged engine that is alive: disable() has to know them.
live_engines: weakref.WeakSet[Any] = weakref.WeakSet()

_KEY = "_ds_unmanaged_gas"


def attach(owner: Any, state: object) -> None:
    """Hang our state on one engine, optimizer or timer. It lives and dies with its owner."""
    # Through vars(): DeepSpeedEngine is an nn.Module that may not be initialized yet.
    vars(owner)[_KEY] = state


def attached(owner: Any) -> Any:
    """The state attached to this object, or None: it is managed, and stock code runs."""
    return vars(owner).get(_KEY)
