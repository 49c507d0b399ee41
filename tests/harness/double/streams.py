"""Who does work and when: the host, and streams, whose work waits in a queue."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


class Agent:
    """Who accesses memory, the host or a stream: a vector clock of what it knows to be done."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[Agent, int] = defaultdict(int)

    def tick(self) -> None:
        self.clock[self] += 1

    def learn(self, clock: dict[Agent, int]) -> None:
        for agent, time in clock.items():
            self.clock[agent] = max(self.clock[agent], time)

    def knows(self, clock: dict[Agent, int]) -> bool:
        return all(self.clock[agent] >= time for agent, time in clock.items())


class Record:
    """What has been counted since reset(), of waits, copies and kernels by kind, and the races."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.races: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.kernels = 0

    def as_dict(self) -> dict[str, Any]:
        counters = ("races", "waits", "copies", "bytes")
        return {name: dict(getattr(self, name)) for name in counters} | {"kernels": self.kernels}


HOST = Agent("host")
RECORD = Record()


def host_waits(kind: str, clock: dict[Agent, int]) -> None:
    HOST.learn(clock)
    RECORD.waits[kind] += 1


@contextmanager
def plain_torch() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


class Stream(Agent):
    """A queue of work that runs when someone waits for it."""

    every: weakref.WeakSet[Stream] = weakref.WeakSet()

    def __init__(self, *_args: Any, name: str = "side stream", **_kwargs: Any) -> None:
        super().__init__(name)
        self._queue: deque[Callable[[], Any]] = deque()
        self.issued = self.done = 0
        Stream.every.add(self)

    def launch(self, work: Callable[[], Any]) -> None:
        """Queue work that comes after everything that the host knows to be done."""
        self.learn(HOST.clock)
        self.tick()
        self._queue.append(work)
        self.issued += 1

    def run(self, until: int | None = None) -> None:
        """Do the queued work, or the first of it."""
        with plain_torch():
            while self.done < (self.issued if until is None else until):
                self.done += 1
                self._queue.popleft()()

    def synchronize(self) -> None:
        self.run()
        host_waits("stream", self.clock)

    def query(self) -> bool:
        # As late as can be: not done before the host has waited for it.
        return HOST.knows({self: self.clock[self]})

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            stream, until = event.stream, event.position
            self.learn(event.clock)
            self.launch(lambda: stream.run(until))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    """A point in a stream's queue."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self.position, self.clock = self.stream.issued, dict(self.stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.position)
            host_waits("event", self.clock)

    def query(self) -> bool:
        return self.stream is None or HOST.knows(self.clock)

    def elapsed_time(self, _later: Event) -> float:
        return 0.0


DEFAULT = Stream(name="default stream")
_streams = [DEFAULT]


def current_stream(_device: Any = None) -> Stream:
    return _streams[-1]


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    _streams.append(stream or current_stream())
    try:
        yield
    finally:
        _streams.pop()


def finish() -> None:
    """Do all queued work. No wait of the program: for tests, before they look."""
    for stream in list(Stream.every):
        stream.run()
        HOST.learn(stream.clock)


def synchronize(_device: Any = None) -> None:
    finish()
    RECORD.waits["device"] += 1
