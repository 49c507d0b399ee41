"""What the ranks do for `nox -s bench`. Every function runs on all ranks of a RankPool."""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from harness.counting import (
    GATHERS,
    REDUCTIONS,
    Collectives,
    Copies,
    PeakMemory,
    WrapperCalls,
    live_bytes,
)
from harness.model import Layers
from harness.training import make_engine

WARM_UP = 2
"""Windows before anything is measured: ZeRO-3 records its order of modules in the first two."""

LET_GO = 0.3
"""Seconds after which gloo's threads hold no buffer of a collective any more."""


class Scalars(torch.nn.Module):
    """``num`` parameters of ``size`` elements in one module, so that the time that anything takes
    per parameter shows."""

    def __init__(self, num: int, size: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.ones(size) for _ in range(num))

    def batch(self) -> torch.Tensor:
        return torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.weights)).sum() * x.sum()


MODELS = {"layers": Layers, "scalars": Scalars}


class Loop:
    """An engine, and one window on it in a certain mode.

    "unmanaged" and "native": N backwards, one step. "managed": a step after each backward, with
    GAS = N. "boundary": the same with GAS = 1 and the boundary set by hand.
    """

    def __init__(self, mode: str, config: dict[str, Any], model: tuple[str, int, int]) -> None:
        self.mode = mode
        self._switch()
        name, num, size = model
        self.module = MODELS[name](num, size)
        make = lambda p: torch.optim.SGD(p, lr=2.0**-20)  # noqa: E731
        self.engine = make_engine(config, model=self.module, optimizer=make)
        dtype = next(self.module.parameters()).dtype
        self.batch = self.module.batch().to(self.engine.device, dtype)

    def _switch(self) -> None:
        """Stock code has to be stock code, without a wrapper in between."""
        import ds_unmanaged_gas

        if self.mode == "unmanaged":
            ds_unmanaged_gas.enable()
        else:
            ds_unmanaged_gas.disable()

    def window(self, n: int) -> None:
        engine = self.engine
        for micro in range(n):
            if self.mode == "boundary":
                engine.set_gradient_accumulation_boundary(micro == n - 1)
            # A stock engine divides a loss that is the module's own output once more.
            engine.backward(engine(self.batch) * 1.0, scale_wrt_gas=False)
            if self.mode in ("managed", "boundary"):
                engine.step()
        if self.mode in ("unmanaged", "native"):
            engine.step()

    def seconds(self, n: int) -> float:
        self._switch()
        synchronize()
        if is_host_only():
            start = time.perf_counter()
            self.window(n)
            synchronize()
            return time.perf_counter() - start
        begin, end = (get_accelerator().Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.window(n)
        deepspeed.comm.barrier()
        end.record()
        synchronize()
        return 1e-3 * float(begin.elapsed_time(end))


def is_host_only() -> bool:
    return bool(get_accelerator().is_synchronized_device())


def synchronize() -> None:
    if not is_host_only():
        get_accelerator().synchronize()
    deepspeed.comm.barrier()


def costs(mode: str, config: dict[str, Any], model: tuple[str, int, int], n: int) -> dict[str, Any]:
    """The counts of one window after the warm-up, and what is alive after it."""
    loop = Loop(mode, config, model)
    for _ in range(WARM_UP):
        loop.window(n)
    if not is_host_only():
        get_accelerator().reset_peak_memory_stats()
    peaks = []
    for _ in range(3):
        with PeakMemory() as peak:
            loop.window(n)
        peaks.append(peak.bytes)
    with Collectives(REDUCTIONS + GATHERS) as collectives, Copies() as copies:
        loop.window(n)
    synchronize()
    time.sleep(LET_GO)
    report = {
        "collectives": dict(collectives.numbers),
        "collective bytes": dict(collectives.bytes),
        "copies": copies.number,
        "copied bytes": copies.bytes,
        "host-device bytes": copies.bytes_between_devices,
        "live bytes": live_bytes(),
        "pinned bytes": live_bytes(lambda tensor: tensor.is_pinned()),
        "peak bytes": min(peaks),
        "peak device bytes": 0 if is_host_only() else get_accelerator().max_memory_allocated(),
    }
    loop.engine.destroy()
    return report


def over_ranks(reports: list[dict[str, Any]]) -> dict[str, int]:
    """The sums of what costs() found, over ranks and over kinds of collectives."""
    return {
        key: sum(sum(r[key].values()) if isinstance(r[key], dict) else r[key] for r in reports)
        for key in reports[0]
    }


def ratios(
    configs: dict[str, dict[str, Any]], model: tuple[str, int, int], n: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a window of the first mode over those of each other one, by mode: in every round
    one window of each, in changing order. The time is that of the slowest rank, since every window
    ends in a barrier."""
    ours, *others = configs
    found: dict[str, list[float]] = {mode: [] for mode in others}
    # What is built first lies elsewhere in memory, which shows in the time of everything.
    for modes in (list(configs), list(reversed(configs))):
        loops = {mode: Loop(mode, configs[mode], model) for mode in modes}
        for loop in loops.values():
            for _ in range(WARM_UP):
                loop.seconds(n)
        # Or full collections of all that was ever imported fall into some windows only.
        gc.collect()
        gc.freeze()
        for _ in range(rounds // 2):
            seconds = {mode: loops[mode].seconds(n) for mode in modes}
            for mode in others:
                found[mode].append(seconds[ours] / seconds[mode])
            modes = [*modes[1:], modes[0]]
        gc.unfreeze()
        for loop in loops.values():
            loop.engine.destroy()
        loops.clear()
    return found


def own_seconds(config: dict[str, Any], model: tuple[str, int, int], n: int) -> dict[str, float]:
    """Seconds that the plugin's own Python code takes in a window of N backwards, per backward and
    per step, under a profiler: without what it calls."""
    loop = Loop("unmanaged", config, model)
    for _ in range(WARM_UP):
        loop.window(n)
    engine, found = loop.engine, {}
    profiles = {"backward": cProfile.Profile(), "step": cProfile.Profile()}
    windows = 3
    for _ in range(windows):
        for _ in range(n):
            loss = engine(loop.batch) * 1.0
            profiles["backward"].enable()
            engine.backward(loss, scale_wrt_gas=False)
            profiles["backward"].disable()
        profiles["step"].enable()
        engine.step()
        profiles["step"].disable()
    for name, profile in profiles.items():
        stats: Any = pstats.Stats(profile)
        own = sum(row[2] for (file, *_), row in stats.stats.items() if "ds_unmanaged_gas/" in file)
        found[name] = own / windows / (n if name == "backward" else 1)
    engine.destroy()
    return found


def managed_overhead(config: dict[str, Any]) -> dict[str, float]:
    """Microseconds that the wrappers add to one backward() and one step() of a managed engine.

    Each wrapper is timed around a function that does nothing, and counted in a real micro-batch:
    its share of a real one would drown in the noise of what is wrapped.
    """
    import wrapt

    import ds_unmanaged_gas
    from ds_unmanaged_gas import engine as wrappers

    ds_unmanaged_gas.enable()
    engine = make_engine(config, model=Layers(1, 4))
    specs = wrappers.patches()
    found = {}
    for name, action in (
        ("backward", lambda: engine.backward(engine(torch.ones(1, 4)) * 1.0)),
        ("step", lambda: engine.step()),
    ):
        with WrapperCalls(specs) as counted:
            action()
        total = 0.0
        for spec in specs:
            if not counted.calls.get(spec.target):
                continue
            arguments = counted.arguments[spec.target]
            bare = _Nothing.nothing.__get__(engine)
            wrapper = wrapt.FunctionWrapper(_Nothing.nothing, spec.wrapper)
            wrapped = wrapper.__get__(engine, type(engine))
            total += counted.calls[spec.target] * (
                _seconds(wrapped, *arguments) - _seconds(bare, *arguments)
            )
        found[name] = 1e6 * total
    engine.destroy()
    return found


class _Nothing:
    def nothing(self, *_: Any, **__: Any) -> None:
        return None


def _seconds(function: Any, args: Any, kwargs: Any) -> float:
    """Of one call: the least of five runs."""
    repeat, runs = 20_000, []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeat):
            function(*args, **kwargs)
        runs.append((time.perf_counter() - start) / repeat)
    return min(runs)


def median_and_quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high
