"""Where tensors are, and who accessed them."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import torch

from .streams import RECORD, Agent, Stream, current_stream, plain_torch


class Block:
    """What is behind one storage, hung on it, so that it dies with it.

    Tensors of device memory are made on a storage that does not own it: ``memory`` does, which
    queued work holds on to. So a program's last reference to a storage can be noticed though work
    on it is still queued.
    """

    # What was freed, by stream, to be given out again, with its accesses.
    _free: dict[Stream, list[tuple[Any, list[Any]]]] = defaultdict(list)

    def __init__(self, memory: Any = None, *, pinned: bool = False) -> None:
        self.memory = memory
        self.pinned = pinned
        self.stream = current_stream()
        self.recorded: set[Stream] = set()
        self.accesses: list[Any] = []  # agent, its time, is a write, first byte, end, where

    @property
    def on_device(self) -> bool:
        return self.memory is not None

    def __del__(self) -> None:
        if self.on_device and not self.recorded and sys is not None:
            Block._free[self.stream].append((self.memory, self.accesses))

    @classmethod
    def allocate(cls, like: torch.Tensor) -> torch.Tensor:
        """A device tensor of this one's shape and strides, on the current stream: old memory."""
        size = like.untyped_storage().nbytes()
        freed = cls._free[current_stream()]
        # The last one that is large enough: others may still be using it.
        fitting = (i for i in reversed(range(len(freed))) if freed[i][0].nbytes() >= size)
        index = next(fitting, None)
        memory, accesses = (_poisoned(size), []) if index is None else freed.pop(index)
        device = torch.device("cpu")
        storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), device, size)
        storage._block = block = cls(memory)
        block.accesses = accesses
        return _view_of(storage, like)

    def touch(self, agent: Agent, tensor: torch.Tensor, is_write: bool, where: str) -> None:
        """Note an access, and each earlier one that it races with."""
        if tensor.numel() == 0:
            return
        begin = tensor.storage_offset() * tensor.element_size()
        strides = zip(tensor.shape, tensor.stride())
        end = begin + (1 + sum((n - 1) * s for n, s in strides)) * tensor.element_size()
        kept = []
        for earlier in self.accesses:
            other, time, was_write, first, last, there = earlier
            is_known = other is agent or agent.clock[other] >= time
            overlaps = first < end and begin < last
            if overlaps and not is_known and (is_write or was_write):
                kinds = ["writes" if write else "reads" for write in (was_write, is_write)]
                text = f"{other.name} {kinds[0]} ({there}), {agent.name} {kinds[1]} ({where})"
                RECORD.races[text] += 1
            # Who comes after this access comes after that one too.
            is_covered = is_known and begin <= first and last <= end and is_write >= was_write
            if not is_covered:
                kept.append(earlier)
        self.accesses = [*kept, (agent, agent.clock[agent], is_write, begin, end, where)]


def _poisoned(size: int) -> Any:
    memory = torch.full((size,), 0x7F, dtype=torch.uint8)  # huge in every floating-point dtype
    return memory.untyped_storage()


def _view_of(storage: Any, like: torch.Tensor) -> torch.Tensor:
    with plain_torch():
        return torch.empty(0, dtype=like.dtype).set_(
            storage, like.storage_offset(), like.size(), like.stride()
        )


def block_of(tensor: torch.Tensor) -> Block:
    storage: Any = tensor.untyped_storage()
    if not hasattr(storage, "_block"):
        storage._block = Block()
    return storage._block  # type: ignore[no-any-return]


def is_on_device(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and block_of(tensor).on_device


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, for queued work."""
    return _view_of(block_of(tensor).memory, tensor) if is_on_device(tensor) else tensor.detach()


def _where() -> str:
    """The innermost places in the package, or else in DeepSpeed, that led here."""
    places: list[str] = []
    frame: Any = sys._getframe(2)
    while frame is not None and len(places) < 3:
        path = frame.f_code.co_filename
        is_ours = "/ds_unmanaged_gas/" in path
        if is_ours or ("/deepspeed/" in path and "/comm/" not in path and "nvtx" not in path):
            name = f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
            places.append(f"OURS {name}" if is_ours else name)
        frame = frame.f_back
    return " < ".join(places)


def pin_memory(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    if is_on_device(tensor):
        raise RuntimeError("pin_memory() of a device tensor")
    pinned = tensor.detach().clone()
    block_of(pinned).pinned = True
    return pinned


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    block_of(tensor).recorded.add(stream)


def touch(agent: Agent, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
    """Note accesses of one operation."""
    agent.tick()
    where = _where()
    for tensors, is_write in ((reads, False), (writes, True)):
        for tensor in tensors:
            block_of(tensor).touch(agent, tensor, is_write, where)
