"""Sends operations to the host or to a stream, and makes tensors tell the double's devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .memory import Block, block_of, is_on_device, is_plain, memory_of, pin_memory, touch
from .streams import HOST, RECORD, current_stream, finish, host_waits

DEVICE = torch.device("cuda", 0)

# Where the next new tensor goes, if a call said so; and whether its copy may be late.
_place: list[bool | None] = [None]
_non_blocking = [False]


@contextmanager
def _placing(device: bool | None, *, non_blocking: bool = False) -> Iterator[None]:
    _place.append(device)
    _non_blocking.append(non_blocking)
    try:
        yield
    finally:
        _place.pop()
        _non_blocking.pop()


class Scheduler(TorchDispatchMode):
    """Sends each operation to the host or to the queue of the current stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._schedule(func, args, kwargs or {})

    @staticmethod
    def _schedule(func: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__.split(".")[0]
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        plain = [t for t in tensors if is_plain(t)]
        returns = func._schema.returns
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return func(*args, **kwargs)  # a view
        if any(t.is_meta for t in tensors) or str(kwargs.get("device")) == "meta":
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return _collective(func, args, kwargs, plain)
        if name in ("copy_", "_to_copy"):
            return _copy(func, name, args, kwargs)
        devices = [is_on_device(t) for t in plain]
        if not any(devices) and not (_place[-1] and not plain):
            if _place[-1] and name.startswith(("new_", *_LIKE)):
                return _launch(func, args, kwargs, [], [])
            return _on_host(func, args, kwargs, plain)
        if _place[-1] is False and name.startswith(("new_", *_LIKE)):
            return func(*args, **kwargs)
        if name not in ("index", "index_put_") and any(
            not there and t.dim() > 0 for there, t in zip(devices, plain)
        ):
            raise RuntimeError(f"{func} of tensors on the host and on the device")
        reads, writes = _split(func, args, kwargs)
        if name.startswith(("new_", *_LIKE)):
            reads = []
        return _launch(func, args, kwargs, reads, writes)


_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")


def _split(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    reads, writes = [], []
    schema = func._schema.arguments
    given = [*zip(schema, args), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
    for argument, value in given:
        info = argument.alias_info
        into = writes if info is not None and info.is_write else reads
        into += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and is_plain(t)]
    return reads, writes


def _on_host(func: Any, args: Any, kwargs: Any, plain: list[torch.Tensor]) -> Any:
    reads, writes = _split(func, args, kwargs)
    touch(HOST, reads, writes)
    return func(*args, **kwargs)


def _launch(
    func: Any, args: Any, kwargs: Any, reads: list[torch.Tensor], writes: list[torch.Tensor]
) -> Any:
    """Queue an operation. Its new tensors are there at once, with what their memory held."""
    stream = current_stream()
    is_empty = func.__name__.startswith(("empty", "new_empty"))
    RECORD.kernels += not is_empty
    # A number that is read when the kernel is launched.
    args, kwargs = tree_map_only(
        torch.Tensor,
        lambda t: t.clone() if is_plain(t) and not is_on_device(t) and t.dim() == 0 else t,
        (args, kwargs),
    )
    inner_args, inner_kwargs = tree_map_only(torch.Tensor, memory_of, (args, kwargs))
    if writes:
        result: Any = None
        stream.launch(lambda: func(*inner_args, **inner_kwargs))
        if func._schema.returns:
            result = writes[0] if len(func._schema.returns) == 1 else tuple(writes)
    else:
        if _WAITS.intersection(func.tags):
            _wait_for_value(reads)
            value = func(*inner_args, **inner_kwargs)
            if not isinstance(value, torch.Tensor):
                return value
        # Of what is in memory now: for the shapes, and for an answer that is no tensor.
        early = func(*inner_args, **inner_kwargs)
        result = tree_map_only(torch.Tensor, Block.allocate, early)
        new = [memory_of(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]

        def work() -> None:
            late = func(*inner_args, **inner_kwargs)
            for tensor, value in zip(new, [t for t in tree_leaves(late) if torch.is_tensor(t)]):
                tensor.copy_(value)

        stream.launch((lambda: None) if is_empty else work)
        if not is_empty:
            writes = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    touch(stream, [t for t in reads if is_on_device(t)], writes)
    return result


# The answer, or its shape, depends on the values.
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _wait_for_value(tensors: list[torch.Tensor]) -> None:
    stream = current_stream()
    stream.launch(lambda: None)
    touch(stream, tensors, [])
    stream.run()
    host_waits("item", stream.clock)


def _copy(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A copy between two memories, or within one."""
    if name == "copy_":
        into, source = args[0], args[1]
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    else:
        source, non_blocking = args[0], _non_blocking[-1]
        to_device = is_on_device(source) if _place[-1] is None else _place[-1]
        into = func(memory_of(source), *args[1:], **kwargs)
        into = Block.allocate(into) if to_device else torch.empty_like(into)
        if non_blocking and not to_device:
            block_of(into).pinned = True  # as torch does
    there, here = is_on_device(source), is_on_device(into)
    if not there and not here:
        touch(HOST, [source], [into])
        into.copy_(source)
        return into
    stream = current_stream()
    kind = "device to device" if there and here else "to the host" if there else "to the device"
    if into.numel():
        RECORD.copies[kind] += 1
        RECORD.bytes[kind] += into.numel() * into.element_size()
    host_side = source if here else into
    is_late = there == here or block_of(host_side).pinned
    value = memory_of(source)
    if not there and not (is_late and non_blocking and source.dtype == into.dtype):
        # Pageable memory is read by the host, when it is called; so is what has to be converted,
        # on some back ends.
        touch(HOST, [source], [])
        value, source = value.clone(), torch.empty(0)
    target = memory_of(into)
    stream.launch(lambda: target.copy_(value))
    touch(stream, [source], [into])
    if there != here and not (non_blocking and (is_late or here)):
        stream.run()
        host_waits("copy", stream.clock)
    return into


def _collective(func: Any, args: Any, kwargs: Any, plain: list[torch.Tensor]) -> Any:
    """Takes place now, since all ranks have to meet in the same order: as work on this stream."""
    if func.__name__.startswith("barrier"):
        return func(*args, **kwargs)
    if not all(is_on_device(t) for t in plain):
        raise RuntimeError(f"{func} of tensors on the host")
    stream = current_stream()
    stream.run()
    inner_args, inner_kwargs = tree_map_only(torch.Tensor, memory_of, (args, kwargs))
    result = func(*inner_args, **inner_kwargs)
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            torch.distributed.Work.unbox(leaf).wait()
    stream.launch(lambda: None)
    touch(stream, [], plain)
    return result


_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_FACTORIES = frozenset(
    [
        *["empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "linspace"],
        *["eye", "randperm", "empty_strided", "scalar_tensor", "normal"],
        *["new_empty", "new_zeros", "new_ones", "new_full", *_LIKE],
    ]
)


def _is_device(device: Any) -> bool:
    return torch.device(device).type == DEVICE.type


class Devices(TorchFunctionMode):
    """Lets tensors tell, and calls take, devices that torch does not know."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is not None and is_plain(tensor):
            if name in ("to", "cpu", "cuda"):
                return _to(name, args, kwargs)
            told = _told(func, name, tensor, args, kwargs)
            if told is not _UNKNOWN:
                return told
        if func is torch.device or name == "_parse_to":
            return func(*args, **kwargs)
        if name in _FACTORIES or name in ("tensor", "as_tensor"):
            return _make(func, name, args, kwargs)
        return func(*_without_device(args), **_without_device(kwargs))


_UNKNOWN = object()


def _told(func: Any, name: str, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """What a tensor tells of itself without an operation, or _UNKNOWN."""
    if name == "is_pinned":
        return block_of(tensor).pinned
    if name == "pin_memory":
        return pin_memory(tensor)
    if not is_on_device(tensor):
        return _UNKNOWN
    if func == _DEVICE_OF:
        return DEVICE
    if func == _IS_CUDA:
        return True
    if name == "get_device":
        return DEVICE.index
    if name == "type" and len(args) == 1 and not kwargs:
        return func(tensor).replace("torch.", f"torch.{DEVICE.type}.")
    if name in ("tolist", "numpy"):
        _wait_for_value([tensor])
        return func(memory_of(tensor), *args[1:], **kwargs)
    return _UNKNOWN


def _without_device(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == DEVICE.type:
        return torch.device("cpu")
    if isinstance(value, str) and value.split(":")[0] == DEVICE.type:
        return "cpu"
    if type(value) in (tuple, list):
        return type(value)(_without_device(each) for each in value)
    if type(value) is dict:
        return {key: _without_device(each) for key, each in value.items()}
    return value


def _make(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    place = None if device is None or torch.device(device).type == "meta" else _is_device(device)
    pinned = kwargs.pop("pin_memory", False)
    if name in ("tensor", "as_tensor"):
        made = func(*args, **_without_device(kwargs))
        if place and not is_on_device(made):
            with _placing(True):
                made = torch.Tensor.to(made, copy=True, dtype=made.dtype)
        return made
    with _placing(place):
        made = func(*args, **_without_device(kwargs))
    if pinned:
        block_of(made).pinned = True
    return made


def _to(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if name != "to":
        kwargs = {"device": "cpu" if name == "cpu" else DEVICE, **kwargs}
    elif len(args) > 1 and isinstance(args[1], torch.Tensor):
        other = args[1]
        kwargs = {
            "device": DEVICE if is_on_device(other) else "cpu",
            "dtype": other.dtype,
            **kwargs,
        }
    else:
        names = ["dtype", "non_blocking", "copy"]
        if len(args) > 1 and not isinstance(args[1], torch.dtype):
            names = ["device", *names]
        kwargs |= dict(zip(names, args[1:]))
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return torch.Tensor.to(tensor, "meta")
    here = is_on_device(tensor)
    place = here if device is None else _is_device(device)
    dtype = kwargs.get("dtype") or tensor.dtype
    memory_format = kwargs.get("memory_format")
    if place == here and dtype == tensor.dtype and not kwargs.get("copy"):
        return tensor if memory_format is None else tensor.contiguous(memory_format=memory_format)
    with _placing(place, non_blocking=bool(kwargs.get("non_blocking"))):
        return torch.Tensor.to(tensor, dtype=dtype, copy=True)


_modes: list[TorchFunctionMode] = []


@contextmanager
def active() -> Iterator[None]:
    """Within, tensors have places, and device work is late."""
    with Scheduler(), Devices() as mode:
        _modes.append(mode)
        try:
            yield
        finally:
            finish()
            _modes.pop()


def keep_mode_in_backward() -> None:
    """torch takes the mode off for a backward(), and with it for all hooks in it."""
    run = torch.autograd._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        if not _modes:
            return run(*args, **kwargs)
        with Devices():
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_in_mode
