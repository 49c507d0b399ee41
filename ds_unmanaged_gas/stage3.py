"""ZeRO stage 3: gradients of DeepSpeedZeroOptimizer_Stage3.

Every backward reduces and scatters; each rank keeps its partition of every parameter's gradient in
one buffer that lives as long as the optimizer and is never cleared by stock code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from .compat import mirror_boundary
from .gradients import Gradients
from .patching import PatchSpec
from .window import attached


class Stage3Gradients(Gradients):
    """Partitions in the optimizer's persistent buffer, copied or added to per parameter.

    [Note: steering stage 3]
    Stock partition_grads() holds both halves of an accumulator: it copies if micro_step_id is 0 and
    adds otherwise. That counter is one for all parameters and moves with the forwards, so a
    parameter that is late in a window is added to what the last window left, and the second of two
    backwards without a forward between them overwrites the first. Here the counter is set for each
    call from what this window has seen of each parameter.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._params = {p.ds_id: p for group in self.optimizer.fp16_groups for p in group}
        # Parameters that contributed in this window. Cleared by close().
        self._seen: set[int] = set()
        # Parameters that contributed in an earlier window and were not zeroed since.
        self._dirty: set[int] = set()

    def partition(self, wrapped: Any, params: Any, partitions: Any) -> list[torch.Tensor]:
        """Copy each parameter's first partition of this window, add each later one."""
        # See [Note: steering stage 3]
        first = [(p, g) for p, g in zip(params, partitions) if p.ds_id not in self._seen]
        later = [(p, g) for p, g in zip(params, partitions) if p.ds_id in self._seen]
        buffers: list[torch.Tensor] = []
        micro_step_id = self.optimizer.micro_step_id
        try:
            for steered, pairs in ((0, first), (1, later)):
                if pairs:
                    self.optimizer.micro_step_id = steered
                    buffers += wrapped([p for p, _ in pairs], [g for _, g in pairs])
        finally:
            self.optimizer.micro_step_id = micro_step_id
        self._seen.update(p.ds_id for p, _ in first)
        return buffers

    @contextmanager
    def backward(self, *, retain_graph: bool) -> Iterator[None]:
        """Surround one engine.backward().

        Stock code counts each module's outputs and inputs in forward, counts down in backward, and
        fetches and releases parameters by that count: a second backward through a retained graph
        would find it at zero and compute with released parameters. So retain the counts as well.
        """
        if not retain_graph:
            yield
            return
        counts = [
            (vars(module), name, vars(module)[name])
            for module in self.engine.module.modules()
            for name in ("applied_pre_backward_ref_cnt", "ds_grads_remaining")
            if name in vars(module)
        ]
        yield
        for attributes, name, count in counts:
            attributes[name] = count

    def is_reduction_pending(self) -> bool:
        return any(bucket.params for bucket in self.optimizer.ipg_buckets.values())

    def finalize(self) -> None:
        """Zero the partitions of parameters that took no part in the window. No collective."""
        # See [Note: I2, per-parameter participation]
        optimizer = self.optimizer
        mirror_boundary(optimizer, True)
        # The buffer is written on this stream everywhere else; stay in its order.
        stream = optimizer.reduce_and_partition_stream
        absent = self._dirty - self._seen
        if absent:
            with get_accelerator().stream(stream):
                for param in (self._params[ds_id] for ds_id in sorted(absent)):
                    zeros = torch.zeros(
                        param.partition_numel(), dtype=param.dtype, device=param.device
                    )
                    optimizer.partition_grads([param], [zeros])
            if not get_accelerator().resolves_data_dependency():
                stream.synchronize()
            # The replay went through partition() as a contribution; it is none.
            self._seen -= absent
            self._dirty -= absent
        if any(
            optimizer.averaged_gradients.get(i) is None for i in range(len(optimizer.fp16_groups))
        ):
            # No backward in this window, so nothing listed the partitions for step().
            optimizer.independent_gradient_partition_epilogue()

    def close(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the window: whatever comes next is a first contribution."""
        self._dirty |= self._seen
        self._seen.clear()


def gradients_for(engine: Any) -> Gradients | None:
    """Return the gradients of a ZeRO-3 engine, or None if it is something else."""
    if type(engine.optimizer) is not DeepSpeedZeroOptimizer_Stage3:
        return None
    return Stage3Gradients(engine)


def _wrap_partition_grads(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    gradients: Stage3Gradients | None = attached(optimizer)
    if gradients is None:
        return wrapped(*args, **kwargs)
    return gradients.partition(wrapped, *args, **kwargs)


def _wrap_zero_grad(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    gradients: Stage3Gradients | None = attached(optimizer)
    if gradients is not None:
        gradients.forget()
    return wrapped(*args, **kwargs)


def patches() -> tuple[PatchSpec, ...]:
    """The changes to the classes that this module handles."""
    return (
        PatchSpec(
            DeepSpeedZeroOptimizer_Stage3,
            "partition_grads",
            "stock decides by a global counter whether to copy or add, so a parameter that is late "
            "or absent in a window keeps the gradient of an earlier one, and two backwards without "
            "a forward between them lose the first",
            _wrap_partition_grads,
        ),
        PatchSpec(
            DeepSpeedZeroOptimizer_Stage3,
            "zero_grad",
            "stock drops the window by resetting that counter, which no longer decides",
            _wrap_zero_grad,
        ),
    )
