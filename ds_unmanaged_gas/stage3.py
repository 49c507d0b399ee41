"""ZeRO stage 3: gradients of DeepSpeedZeroOptimizer_Stage3.

Every backward reduces and scatters; each rank keeps its partition of every parameter's gradient in
one buffer that lives as long as the optimizer and is never cleared by stock code.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from .compat import mirror_boundary
from .gradients import Gradients, scale_of
from .offload import HostSums, divide_norms, keep_alive, order
from .patching import PatchSpec, always
from .window import attached

# Of each module: how many of its outputs and inputs a backward has still to pass.
_BACKWARD_COUNTS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")

# Stock methods that are not wrapped, but whose effect is counted on. See fingerprints.py.
COUNTED_ON = (
    (
        DeepSpeedZeroOptimizer_Stage3,
        (
            "backward",
            "clear_backward_seen_flag",
            "reset_cpu_buffers",
            "_get_norm_groups",
            "_pre_step",
            "_prepare_fp32_grad_for_sub_group",
            "_swappable_optimizer_subgroup",
            "step",
        ),
    ),
)


def _coordinator_of(optimizer: Any) -> Any:
    """What fetches and releases parameters during training."""
    get = optimizer.parameter_offload.get_param_coordinator
    # Up to some 0.16 there is another one for evaluation.
    return get(training=True) if "training" in inspect.signature(get).parameters else get()


def _current_stream() -> Any:
    return get_accelerator().current_stream()


def _drop_grad(param: Any) -> None:
    if param.grad is not None:
        keep_alive(param.grad)
    param.grad = None


class Stage3Gradients(Gradients):
    """Partitions in the optimizer's persistent buffer, copied or added to per parameter.

    [Note: steering stage 3]
    Stock partition_grads() holds both halves of an accumulator: it copies if micro_step_id is 0 and
    adds otherwise. That counter is one for all parameters and moves with the forwards, so a
    parameter that is late in a window is added to what the last window left, and the second of two
    backwards without a forward between them overwrites the first. Here the counter is set for each
    call from what this window has seen of each parameter.
    """

    def __init__(self, engine: Any, *, at_step: bool) -> None:
        super().__init__(engine)
        self.reduces_in_backward = not at_step
        # Whether a gradient that autograd brings is kept; else stock code reduces it.
        self.keeps = at_step
        # What was kept: full local sums. Cleared by hand_over() and close().
        self._local: dict[int, torch.Tensor] = {}
        self._is_lent = False
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
            for name in _BACKWARD_COUNTS
            if name in vars(module)
        ]
        yield
        for attributes, name, count in counts:
            attributes[name] = count

    def is_reduction_pending(self) -> bool:
        return any(bucket.params for bucket in self.optimizer.ipg_buckets.values())

    def keep(self, param: Any) -> None:
        """Take a gradient that autograd has just put into ``param.grad``, instead of reducing."""
        if not getattr(param, "ds_grad_is_ready", True):
            return  # the next tile of the same computation adds to it
        grad = param.grad.detach()
        if param.ds_id in self._local:
            self._local[param.ds_id].add_(grad)
            _drop_grad(param)
        else:
            self._local[param.ds_id] = grad.to(self.optimizer.gradient_accumulation_dtype)
            param.grad = None

    def _reduce(self) -> None:
        """Reduce what was kept, as if one backward had brought it all, of every parameter and in
        the same order on every rank. Collective: those of one backward."""
        optimizer = self.optimizer
        self.keeps = False
        try:
            for ds_id, param in self._params.items():
                total = self._local.pop(ds_id, None)
                if total is None:
                    total = torch.zeros(param.ds_shape, dtype=param.dtype, device=param.device)
                # It is released, and autograd would not let it have a gradient of another size.
                param.grad = torch.empty_like(param)
                # Stock code reduces in place what it does not copy into its bucket.
                dtype = self._reduction_dtype(param)
                param.grad.data = total.to(dtype, copy=self._is_lent)
                optimizer.reduce_ready_partitions_and_remove_grads(param)
            optimizer.independent_gradient_partition_epilogue()
        finally:
            self.keeps = True

    def _reduction_dtype(self, param: Any) -> torch.dtype:
        optimizer = self.optimizer
        if hasattr(optimizer, "get_param_comm_dtype"):  # from 0.17.2
            return optimizer.get_param_comm_dtype(param)  # type: ignore[no-any-return]
        return optimizer.communication_data_type  # type: ignore[no-any-return]

    def local_grad(self, param: Any) -> torch.Tensor | None:
        return self._local.get(param.ds_id)

    @contextmanager
    def lend(self) -> Iterator[None]:
        if self.reduces_in_backward:
            # hand_over() may be called again, and more may be added in between.
            yield
            return
        local = dict(self._local)
        self._is_lent = True
        try:
            yield
        finally:
            self._local, self._is_lent = local, False
            self.forget()

    def norm(self) -> float:
        norms = [float(norm) for norm in self.optimizer._get_norm_groups()]
        return math.hypot(*norms)

    def loss_scale(self) -> float:
        return scale_of(self.optimizer)

    def hand_over(self) -> None:
        """Zero the partitions of parameters that took no part in the window. No collective."""
        # See [Note: I2, per-parameter participation]
        optimizer = self.optimizer
        mirror_boundary(optimizer, True)
        if not self.reduces_in_backward:
            self._reduce()
        absent = self._dirty - self._seen
        self._replay(sorted(absent))
        # The replay went through partition() as a contribution; it is none.
        self._seen -= absent
        self._dirty -= absent
        if any(
            optimizer.averaged_gradients.get(i) is None for i in range(len(optimizer.fp16_groups))
        ):
            # No backward in this window, so nothing listed the partitions for step().
            optimizer.independent_gradient_partition_epilogue()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Write the partition buffer on the stream that owns it.

        [Note: who owns the partition buffer of stage 3]
        With overlap_comm stock code reduces, copies and adds on a stream of its own, and looks for
        overflows there; the optimizer and everyone else reads on the current stream. Stock code
        joins the two in every epilogue. What is done beside that, zeroing and dividing, comes after
        what the current stream was given so far (the last update may still be reading), and before
        what it is given next.
        """
        stream, current = self.optimizer.reduce_and_partition_stream, _current_stream()
        order(current, stream)
        with get_accelerator().stream(stream):
            yield
        order(stream, current)

    def _replay(self, ds_ids: list[int]) -> None:
        """Contribute zero gradients of these parameters."""
        params = [self._params[ds_id] for ds_id in ds_ids]
        if not params:
            return
        with self._on_stream():
            for param in params:
                if param.grad is None:  # up to 0.16.5 a GPU stream is recorded on it
                    param.grad = torch.empty_like(param)
            zeros = [
                torch.zeros(
                    p.partition_numel(),
                    dtype=self.optimizer.gradient_accumulation_dtype,
                    device=get_accelerator().current_device_name(),
                )
                for p in params
            ]
            self.optimizer.partition_grads(params, zeros)

    def final(self) -> Iterable[torch.Tensor]:
        return [self.optimizer.grad_partitions_flat_buffer]

    def divide(self, divisor: float) -> None:
        with self._on_stream():
            super().divide(divisor)

    def close(self) -> None:
        self._local.clear()
        self.forget()

    def recover(self) -> None:
        """Undo what an exception left half done: the reduction, and the fetching of parameters."""
        optimizer = self.optimizer
        if hasattr(optimizer, "ipg_buckets"):  # from 0.17.2
            for bucket in optimizer.ipg_buckets.values():
                bucket.params.clear()
                bucket.elements = 0
        else:
            optimizer.params_in_ipg_bucket.clear()
        for key in optimizer.params_already_reduced:
            optimizer.params_already_reduced[key] = False
        for param in self._params.values():
            _drop_grad(param)
        # Stock step() gives the optimizer one sub-group at a time.
        backup = getattr(optimizer, "backup_optimizer", None)  # with a partial offload
        for holder in (optimizer.optimizer, *([backup] if backup is not None else [])):
            for group in holder.param_groups:
                group["params"] = []
        self._release_parameters()

    def _release_parameters(self) -> None:
        """Leave every parameter partitioned, and let the next forward begin anew."""
        for module in self.engine.module.modules():
            for name in _BACKWARD_COUNTS:
                if name in vars(module):
                    setattr(module, name, 0)
        fetcher = _coordinator_of(self.optimizer)
        in_flight = fetcher._PartitionedParameterCoordinator__inflight_param_registry
        for param in list(in_flight):
            in_flight.pop(param).wait()
        if hasattr(fetcher, "release_backward_leftovers"):  # from 0.19.3
            fetcher.release_backward_leftovers()
        fetcher.release_and_reset_all(self.engine.module)
        if fetcher.is_complete_trace():
            fetcher.reset_step()
        elif not fetcher.is_invalid_trace():
            fetcher._invalidate_trace()

    def forget(self) -> None:
        """Drop what was reduced: whatever comes next is a first contribution."""
        self._dirty |= self._seen
        self._seen.clear()


class Stage3OffloadGradients(Stage3Gradients):
    """Partitions summed on the host, in the optimizer's gradient buffer; the stock partition buffer
    serves from a parameter's second backward in a window on, if its dtype differs.

    A sub-group whose optimizer states live on NVMe has no gradient buffer to sum in: there the
    stock partition buffer is used throughout, and stock code writes it out at step().
    """

    def __init__(self, engine: Any, *, at_step: bool) -> None:
        super().__init__(engine, at_step=at_step)
        dtype = self.optimizer.gradient_accumulation_dtype
        self._sums = HostSums(dtype, self._target, self._spare)
        # Of the window that is handed over.
        self._norms: dict[int, torch.Tensor] = {}
        # To be told of an overflow without a wait. Stock code takes it to the device in any case.
        self.optimizer.inf_or_nan_tracker = self.optimizer.inf_or_nan_tracker.to(
            get_accelerator().current_device_name()
        )

    def partition(self, wrapped: Any, params: Any, partitions: Any) -> list[torch.Tensor]:
        """Take each parameter's averaged partition."""
        pairs = list(zip(params, partitions))
        on_nvme = [(param, grad) for param, grad in pairs if self._is_on_nvme(param)]
        on_host = [(param, grad) for param, grad in pairs if not self._is_on_nvme(param)]
        # Without an element this rank's part of the parameter is padding only.
        self._sums.add((param.ds_id, grad) for param, grad in on_host if grad.numel() > 0)
        for param, _ in on_host:
            _drop_grad(param)
        if on_nvme:
            super().partition(wrapped, [p for p, _ in on_nvme], [g for _, g in on_nvme])
        return []  # the buffers are for MiCS, which is refused

    def _is_on_nvme(self, param: Any) -> bool:
        sub_group, _, _ = self.optimizer.grad_position[self.optimizer.get_param_id(param)]
        return bool(self.optimizer._swappable_optimizer_subgroup(sub_group))

    def _target(self, ds_id: int) -> torch.Tensor:
        param = self._params[ds_id]
        position = self.optimizer.grad_position[self.optimizer.get_param_id(param)]
        sub_group, offset, length = position
        flat: torch.Tensor = self.optimizer.fp32_partitioned_groups_flat[sub_group].grad
        return flat.narrow(0, offset, length)

    def _spare(self, ds_id: int) -> torch.Tensor:
        partitions = self.optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        spare: torch.Tensor = partitions[ds_id]
        return spare

    def finalize(self, divisor: float) -> None:
        if divisor != 1.0:
            # What goes to NVMe has to be divided before hand_over() writes it there. It has arrived
            # on the host: stock code waits for it at the end of each backward.
            for ds_id in self._seen:
                self._spare(ds_id).div_(divisor)
            for ds_id, total in self._local.items():
                if self._is_on_nvme(self._params[ds_id]):
                    total.div_(divisor)
        super().finalize(divisor)

    def final(self) -> Iterable[torch.Tensor]:
        groups = enumerate(self.optimizer.fp32_partitioned_groups_flat)
        on_nvme = self.optimizer._swappable_optimizer_subgroup
        return [group.grad for index, group in groups if not on_nvme(index)]

    def divide(self, divisor: float) -> None:
        self._sums.wait_for_copies()
        for tensor in self.final():
            tensor.div_(divisor)
        divide_norms(self.optimizer, self._host_keys(), divisor)

    def _host_keys(self) -> list[int]:
        """What stock code knows the parameters by whose sums are on the host."""
        return [self.optimizer.get_param_id(self._params[ds_id]) for ds_id in self._sums.seen()]

    def hand_over(self) -> None:
        """Complete the optimizer's gradient buffers. No collective."""
        optimizer = self.optimizer
        mirror_boundary(optimizer, True)
        if not self.reduces_in_backward:
            self._reduce()
        # One more backward with zero gradients, at the boundary: stock code then does all that it
        # does there with NVMe. It overwrites what an earlier window left of absent parameters.
        self._replay(sorted(self._seen | self._dirty))
        self._dirty.clear()
        self._norms = self._sums.norms()
        for ds_id, norm in self._norms.items():
            key = optimizer.get_param_id(self._params[ds_id])
            optimizer.norm_for_param_grads[key] = norm
        self._sums.finalize()

    def check_overflow(self) -> None:
        norms = list(self._norms.values())
        if norms and self.optimizer.dtype == torch.float16:  # else stock code looks for none
            with self._on_stream():  # where stock code does
                overflow = torch.stack(norms).isfinite().all().logical_not()
                self.optimizer.inf_or_nan_tracker.logical_or_(overflow)

    def tell_overflow(self) -> Iterable[torch.Tensor]:
        norms: Iterable[torch.Tensor] = self.optimizer.norm_for_param_grads.values()
        return norms

    def _clear_spares(self) -> None:
        """Leave no overflow in the buffer that stock code searches for them in every step."""
        for ds_id in self._sums.in_spare():
            self._spare(ds_id).zero_()

    def close(self) -> None:
        if self.optimizer.overflow:
            self._sums.wait_for_copies()
            self._clear_spares()
        super().close()

    def forget(self) -> None:
        super().forget()
        self._sums.forget()

    def discard(self) -> None:
        self.optimizer.reset_cpu_buffers()  # the norms
        self._sums.wait_for_copies()
        self._clear_spares()
        super().discard()


def gradients_for(engine: Any, *, at_step: bool) -> Gradients | None:
    """Return the gradients of a ZeRO-3 engine, or None if it is something else."""
    optimizer = engine.optimizer
    if type(optimizer) is not DeepSpeedZeroOptimizer_Stage3:
        return None
    if optimizer.offload_optimizer:
        return Stage3OffloadGradients(engine, at_step=at_step)
    return Stage3Gradients(engine, at_step=at_step)


def _wrap_reduce_ready(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    gradients: Stage3Gradients = attached(optimizer)
    if not gradients.keeps:
        return wrapped(*args, **kwargs)
    return gradients.keep(*args, **kwargs)


def _wrap_partition_grads(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    gradients: Stage3Gradients = attached(optimizer)
    buffers = gradients.partition(wrapped, *args, **kwargs)
    # 0.17.2 empties a bucket that it has reduced, but does not set its fill level back.
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        if bucket.params is args[0]:
            bucket.elements = 0
    return buffers


def _wrap_epilogue(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    gradients: Stage3Gradients = attached(optimizer)
    if gradients.keeps:
        return None  # nothing was reduced
    return wrapped(*args, **kwargs)


def _wrap_zero_grad(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    gradients: Stage3Gradients = attached(optimizer)
    gradients.close()
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
            on_objects=always,
        ),
        PatchSpec(
            DeepSpeedZeroOptimizer_Stage3,
            "reduce_ready_partitions_and_remove_grads",
            'keeps gradients for step(), if "reduction" is "step"',
            _wrap_reduce_ready,
            on_objects=lambda optimizer: attached(optimizer).keeps,
        ),
        PatchSpec(
            DeepSpeedZeroOptimizer_Stage3,
            "independent_gradient_partition_epilogue",
            'with "reduction": "step" stock would wait for a reduction after each backward',
            _wrap_epilogue,
            on_objects=lambda optimizer: attached(optimizer).keeps,
        ),
        PatchSpec(
            DeepSpeedZeroOptimizer_Stage3,
            "zero_grad",
            "stock drops the window by resetting that counter, which no longer decides",
            _wrap_zero_grad,
            on_objects=always,
        ),
    )
