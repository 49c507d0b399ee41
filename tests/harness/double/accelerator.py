"""What DeepSpeed asks an accelerator for, as a GPU answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import deepspeed.ops.adam
import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime import engine

from .memory import block_of, is_on_device, pin_memory, record_stream
from .modes import DEVICE, keep_mode_in_backward
from .streams import DEFAULT, Event, Stream, current_stream, on_stream, synchronize


class Fused:
    """Marks what DeepSpeed shall take for a fused optimizer."""


class _AnyFused(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Fused)


class FusedAdam(Fused, torch.optim.AdamW, metaclass=_AnyFused):
    """DeepSpeed's, of the same formula, without its kernel."""

    def __init__(
        self, params: Any, *, bias_correction: Any = True, adam_w_mode: Any = True, **options: Any
    ) -> None:
        assert bias_correction and (adam_w_mode or not options.get("weight_decay"))
        torch.optim.AdamW.__init__(self, params, **{"weight_decay": 0.0, **options})


class FusedSGD(Fused, torch.optim.SGD):
    """One whose arithmetic can be exact."""


def _answering(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _constructor(dtype: torch.dtype) -> property:
    """As ``get_accelerator().FloatTensor`` is: it makes tensors from data."""

    def make(data: Any, **options: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype, **{"device": DEVICE, **options})

    return property(lambda _: make)


class Double(CPU_Accelerator):  # type: ignore[misc]
    """As the CUDA accelerator answers."""

    Stream, Event = Stream, Event
    FloatTensor = _constructor(torch.float32)
    HalfTensor = _constructor(torch.float16)
    BFloat16Tensor = _constructor(torch.bfloat16)
    DoubleTensor = _constructor(torch.float64)
    ByteTensor = _constructor(torch.uint8)
    IntTensor = _constructor(torch.int32)
    LongTensor = _constructor(torch.int64)

    is_available = is_fp16_supported = _answering(True)
    is_synchronized_device = resolves_data_dependency = _answering(False)
    use_host_timers = handles_memory_backpressure = _answering(False)
    supported_dtypes = _answering([torch.float32, torch.float16, torch.bfloat16])
    current_device = memory_allocated = memory_cached = memory_reserved = _answering(0)
    max_memory_allocated = max_memory_cached = max_memory_reserved = _answering(0)
    device_count = _answering(1)
    current_device_name = _answering(str(DEVICE))
    default_stream = _answering(DEFAULT)
    set_device = empty_cache = _answering(None)
    synchronize = staticmethod(synchronize)
    stream = staticmethod(on_stream)
    current_stream = staticmethod(current_stream)
    pin_memory = staticmethod(pin_memory)
    on_accelerator = staticmethod(is_on_device)

    def __init__(self) -> None:
        super().__init__()
        self._name, self._communication_backend_name = DEVICE.type, "gloo"

    def device_name(self, device_index: int | None = None) -> str:
        return DEVICE.type if device_index is None else f"{DEVICE.type}:{device_index}"

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return block_of(tensor).pinned


# Which properties and methods are abstract differs from release to release; none is needed.
Double.__abstractmethods__ = frozenset()


class _Handle:
    """Of an asynchronous collective: wait() lets the current stream wait, and not the host."""

    def __init__(self) -> None:
        self._done = current_stream().record_event()

    def wait(self) -> None:
        current_stream().wait_event(self._done)


def _with_handle(collective: Any) -> Any:
    def collect(*args: Any, **kwargs: Any) -> Any:
        return None if collective(*args, **kwargs) is None else _Handle()

    return collect


_COLLECTIVES = (
    "all_reduce",
    "inference_all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
)


def install() -> None:
    """Make DeepSpeed use the double, in this process, from now on."""
    set_accelerator(Double())
    deepspeed.ops.adam.FusedAdam = FusedAdam
    engine.FusedAdam = FusedAdam
    backend: Any = sys.modules["deepspeed.comm.torch"].TorchBackend  # type: ignore[attr-defined]
    for name in _COLLECTIVES:
        if hasattr(backend, name):
            setattr(backend, name, _with_handle(getattr(backend, name)))
    torch.Tensor.record_stream = record_stream  # type: ignore[assignment, method-assign]
    keep_mode_in_backward()
