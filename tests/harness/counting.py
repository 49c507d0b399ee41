"""What a window costs, in counts: copies, collectives, bytes that stay and bytes in between, and
calls of our wrappers."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import wrapt
from torch.utils._python_dispatch import TorchDispatchMode

from ds_unmanaged_gas.patching import PatchSpec

COPIES = ("aten._to_copy.", "aten.copy_.", "aten.clone.")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor")
GATHERS = ("all_gather", "all_gather_into_tensor", "broadcast")

# Norms, flags and counters, which are no gradients.
_FEW = 16


class Copies(TorchDispatchMode):
    """Counts copies of tensors of more than a few elements, in all threads' order."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.bytes = 0
        self.bytes_between_devices = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func).startswith(COPIES) and isinstance(out, torch.Tensor) and out.numel() > _FEW:
            self.number += 1
            self.bytes += out.numel() * out.element_size()
            devices = {tensor.device.type for tensor in (out, *args) if torch.is_tensor(tensor)}
            if len(devices) > 1:
                self.bytes_between_devices += out.numel() * out.element_size()
        return out


class Collectives:
    """Counts what DeepSpeed hands to torch.distributed, but for a few numbers such as norms."""

    def __init__(self, kinds: tuple[str, ...] = REDUCTIONS) -> None:
        self._backend: Any = sys.modules["deepspeed.comm.torch"].TorchBackend  # type: ignore[attr-defined]
        self._kinds = kinds
        self.numbers: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)
        self.elements = 0

    @property
    def number(self) -> int:
        return sum(self.numbers.values())

    def __enter__(self) -> Collectives:  # noqa: PYI034
        self._originals = {name: getattr(self._backend, name) for name in self._kinds}
        for name, original in self._originals.items():
            setattr(self._backend, name, self._counted(name, original))
        return self

    def _counted(self, name: str, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            largest = max(tensors, key=lambda t: t.numel())
            if largest.numel() > _FEW:
                self.numbers[name] += 1
                self.elements += largest.numel()
                self.bytes[name] += largest.numel() * largest.element_size()
            return original(*args, **kwargs)

        return counted

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(self._backend, name, original)


def live_bytes(condition: Callable[[torch.Tensor], bool] = lambda _: True) -> int:
    """Bytes of all tensors of more than a few elements that this process can reach, each storage
    once; of those for which the condition is true."""
    gc.collect()
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are looked at
        for candidate in gc.get_objects():
            if isinstance(candidate, torch.Tensor) and candidate.layout == torch.strided:
                storage = candidate.untyped_storage()
                if storage.nbytes() > 8 * _FEW and condition(candidate):
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class PeakMemory:
    """The bytes of host tensors above those on entry, at most, by torch's profiler.

    A tensor that a thread of gloo was the last to hold is let go unseen, and stays counted: of
    several runs the least is right.
    """

    def __enter__(self) -> PeakMemory:  # noqa: PYI034
        gc.collect()
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._profile.__exit__(*exception)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            self._profile.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        changes = [event for event in events if event.get("name") == "[memory]"]
        host = torch.autograd.DeviceType.CPU.value
        changes = [event for event in changes if event["args"]["Device Type"] == host]
        changes.sort(key=lambda event: float(event["ts"]))
        self.bytes = max(itertools.accumulate(event["args"]["Bytes"] for event in changes))


class WrapperCalls:
    """Counts the calls of every wrapped method of a class, and keeps the arguments of one."""

    def __init__(self, specs: Iterable[PatchSpec]) -> None:
        self._specs = [spec for spec in specs if spec.wrapper is not None and not spec.on_objects]
        self.calls = {spec.target: 0 for spec in self._specs}
        self.arguments: dict[str, tuple[Any, Any]] = {}

    def __enter__(self) -> WrapperCalls:  # noqa: PYI034
        self._before = [(spec, vars(spec.owner)[spec.name]) for spec in self._specs]
        for spec, entry in self._before:
            setattr(spec.owner, spec.name, self._counting(spec.target, entry))
        return self

    def _counting(self, target: str, entry: Any) -> Any:
        def count(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            self.calls[target] += 1
            self.arguments[target] = (args, kwargs)
            return wrapped(*args, **kwargs)

        return wrapt.FunctionWrapper(entry, count)

    def __exit__(self, *_: object) -> None:
        for spec, entry in self._before:
            setattr(spec.owner, spec.name, entry)
