"""One rank of a RankPool."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any


def log_name(rank: int) -> str:
    return f"rank{rank}.log"


def main(pipe: Any, rank: int, world_size: int, folder: str, on_double: bool = False) -> None:
    log = os.open(Path(folder, log_name(rank)), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if "harness.preload" not in sys.modules:
        raise RuntimeError("the fork server could not import harness.preload")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
    )
    if on_double:
        from . import double

        double.install()
    _initialize(rank, world_size, folder)
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            where, name, kwargs, plugin = pipe.recv()
        except EOFError:
            return
        try:
            if where not in modules:
                modules[where] = _load(where)
            with _on_double() if on_double else nullcontext():
                answer = (True, _run(getattr(modules[where], name), kwargs, plugin=plugin))
        except Exception:
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except Exception:
            pipe.send((False, traceback.format_exc()))


@contextmanager
def _on_double() -> Iterator[None]:
    """Run a task on the accelerator double. Leaves the lines of the package that it has run in the
    folder DOUBLE_COVERAGE, if there is one: see accelerator_lines.py."""
    from . import double

    folder = os.environ.get("DOUBLE_COVERAGE")
    if folder is None:
        with double.active():
            yield
        return
    import coverage

    import ds_unmanaged_gas

    package = Path(ds_unmanaged_gas.__file__).parent
    tracer = coverage.Coverage(
        data_file=str(Path(folder, "rank")),
        data_suffix=True,
        include=[f"{package}/*"],
        config_file=False,
        check_preimported=False,
    )
    tracer.start()
    try:
        with double.active():
            yield
    finally:
        tracer.stop()
        tracer.save()


def _initialize(rank: int, world_size: int, folder: str) -> None:
    import deepspeed
    import torch

    comm: Any = sys.modules["deepspeed.comm.torch"]
    # An optional op for CPUs that takes a minute to build. Without it gloo does all collectives.
    comm.build_shm_op = lambda: None
    # gloo only: ZeRO-3 before 0.19.8 waits for the last of several asynchronous gathers, which is
    # enough on a stream but not here. Finish each one before the next is issued.
    for method in ("all_gather", "all_gather_into_tensor"):
        setattr(comm.TorchBackend, method, _waiting(getattr(comm.TorchBackend, method)))
    # CPU only: before 0.19.4 gradients are sorted by a type name that no CPU tensor has, so without
    # contiguous_gradients none is reduced, in managed mode as well.
    zero12: Any = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
    zero12.split_half_float_double = _split_by_dtype
    # gloo only: in 0.18.7-0.18.9 the flat weights of ZeRO-1/2 carry autograd history, and gloo's
    # in-place all-gather fails on them, in managed mode as well.
    optimizer = zero12.DeepSpeedZeroOptimizer
    optimizer.flatten_dense_tensors_aligned = _detached(optimizer.flatten_dense_tensors_aligned)
    # The CPU accelerator reports fp16 by the presence of oneDNN kernels for it. torch computes
    # half precision on every CPU.
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True
        halves = [torch.float16, torch.bfloat16]
        accelerator.supported_dtypes = lambda: [torch.float32, *halves]
    deepspeed.init_distributed(
        dist_backend=accelerator.communication_backend_name() or "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        auto_mpi_discovery=False,
    )
    torch.set_num_threads(1)


def _waiting(gather: Any) -> Any:
    def gather_and_wait(*args: Any, **kwargs: Any) -> Any:
        handle = gather(*args, **kwargs)
        if handle is not None:
            handle.wait()
        return handle

    return gather_and_wait


def _detached(flatten: Any) -> Any:
    def flatten_and_detach(*args: Any, **kwargs: Any) -> Any:
        return flatten(*args, **kwargs).detach()

    return flatten_and_detach


def _split_by_dtype(tensors: Any) -> Any:
    by_dtype: dict[Any, list[Any]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return list(by_dtype.values())


def _load(where: str) -> ModuleType:
    """Import a module of the harness by name, a test module by its path."""
    path = Path(where)
    if path.suffix != ".py":
        return importlib.import_module(where)
    spec = importlib.util.spec_from_file_location(f"task_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(function: Any, kwargs: dict[str, Any], *, plugin: bool) -> Any:
    import deepspeed
    import torch

    import ds_unmanaged_gas

    gc.collect()  # the last task's engines
    gc.freeze()  # DeepSpeed collects garbage often: spare it all that was imported
    # Once an engine used torch_autocast, DeepSpeed treats all later ones of the process alike.
    autocast: Any = sys.modules.get("deepspeed.runtime.torch_autocast")  # from 0.17.2
    if autocast is not None:
        autocast.TORCH_AUTOCAST_INITIALIZED = False
    if plugin:
        ds_unmanaged_gas.enable()
    else:
        ds_unmanaged_gas.disable()
    deepspeed.comm.barrier()
    torch.manual_seed(0)
    return function(**kwargs)
