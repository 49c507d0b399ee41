"""All ranks do the same: rank 0 broadcasts a call, every rank makes it, rank 0 gets the results."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_FOREVER = datetime.timedelta(days=365)


class FailedOnRanksError(Exception):
    """A call failed on at least one rank; the text has every error. The engine's window, if the
    call added to it, is to be discarded."""


class AgreedError(Exception):
    """A failure that needs no traceback. Raised inside an agreement(), or on every rank alike."""


class Team:
    def __init__(self) -> None:
        # For messages, so that an idle server waits without an accelerator, and without a timeout.
        self._group = dist.new_group(backend="gloo", timeout=_FOREVER)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._worker: Any = None

    def employ(self, worker: Any) -> None:
        """Whose methods call() calls."""
        self._worker = worker

    def call(self, method: str, **arguments: Any) -> list[Any]:
        """Rank 0: call this method on every rank. Returns the results by rank.

        Raises FailedOnRanksError. Collective: one broadcast, one gather, those of the method.
        """
        dist.broadcast_object_list([(method, arguments)], src=0, group=self._group)
        outcomes = self._do(method, arguments)
        errors = [f"rank {i}: {error}" for i, (error, _) in enumerate(outcomes) if error]
        if errors:
            raise FailedOnRanksError("; ".join(dict.fromkeys(errors)))
        return [result for _, result in outcomes]

    def dismiss(self) -> None:
        """Rank 0: let the others return from follow()."""
        dist.broadcast_object_list([(None, {})], src=0, group=self._group)

    def follow(self) -> None:
        """Other ranks: do what rank 0 calls, until it dismisses us."""
        while True:
            message: list[Any] = [None]
            dist.broadcast_object_list(message, src=0, group=self._group)
            method, arguments = message[0]
            if method is None:
                return
            self._do(method, arguments)

    def _do(self, method: str, arguments: dict[str, Any]) -> list[Any]:
        outcome: tuple[str | None, Any]
        try:
            outcome = (None, getattr(self._worker, method)(**arguments))
        except AgreedError as error:
            outcome = (str(error), None)
        except Exception as error:  # noqa: BLE001 -- told to the client, and to the log
            traceback.print_exc()
            outcome = (f"{type(error).__name__}: {error}", None)
        outcomes: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(outcome, outcomes, dst=0, group=self._group)
        return outcomes or []

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Raise AgreedError on every rank if the block raised on one. Collective: one all-reduce,
        after what the block does."""
        error = None
        try:
            yield
        except AgreedError as failure:
            error = str(failure)
        except Exception as failure:  # noqa: BLE001 -- reported on every rank
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}"
        failed = torch.tensor([error is not None], dtype=torch.int32)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if failed.item():
            raise AgreedError(error or "failed on another rank")
