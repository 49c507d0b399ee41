"""ZeRO stages 1 and 2: gradients of DeepSpeedZeroOptimizer.

Stage 1 keeps full local gradients and reduces them once, at step(). Stage 2 reduces on every
backward and keeps this rank's partition of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from .compat import mirror_boundary, reduces_every_tile
from .gradients import HAS_TORCH_STYLE, Gradients, scale_of
from .offload import HostSums, all_finite, divide_norms, keep_alive, order
from .patching import PatchSpec
from .window import attached

# Stage 2 keeps each parameter's sum in a list per group, and makes flat partitions of them at the
# boundary; up to 0.17.5 it sums the flat partitions.
_KEEPS_TENSORS = hasattr(DeepSpeedZeroOptimizer, "get_all_grad_tensors")

# Stock methods that are not wrapped, but whose effect is counted on. See fingerprints.py.
COUNTED_ON = (
    (
        DeepSpeedZeroOptimizer,
        (
            "backward",
            "backward_prologue",
            "setup_buckets",
            "process_gradients",
            "independent_gradient_partition_epilogue",
            "finalize_gradient_accumulation_boundary",
            "reduce_ipg_grads",
            "reduce_ready_partitions_and_remove_grads",
            "get_flat_partition",
            "reset_cpu_buffers",
            "scaled_global_norm",
            "step",
            "zero_grad",
        ),
    ),
)


def _reset_reduction(optimizer: Any) -> None:
    """Forget a reduction that an exception left half done: nothing is in a bucket, nothing counts
    as reduced."""
    if optimizer.overlap_comm:
        # It may still read the buckets, whose memory is free from here on.
        order(optimizer.reduction_stream, get_accelerator().current_stream())
    if hasattr(optimizer, "ipg_buckets"):  # from 0.17.2
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        optimizer.extra_large_param_to_reduce.clear()
    else:
        optimizer.params_in_ipg_bucket = []
        optimizer.grads_in_ipg_bucket = []
        optimizer.elements_in_ipg_bucket = 0
        optimizer.ipg_bucket_has_moe_params = False
        optimizer.extra_large_param_to_reduce = None
    for index in range(len(optimizer.params_already_reduced)):
        optimizer.params_already_reduced[index] = False
    optimizer._clear_previous_reduced_grads()
    optimizer._release_ipg_buffers()
    if hasattr(optimizer, "ready_for_gradients"):  # from 0.16.5
        optimizer.ready_for_gradients = False


def _make_buckets(optimizer: Any) -> None:
    """Let the reduction have its buckets, which exist if a gradient hook ran since the last one. A
    rank without any backward has none."""
    if hasattr(optimizer, "setup_buckets"):  # from 0.18.3
        optimizer.setup_buckets()
    elif hasattr(optimizer, "ready_for_gradients"):  # from 0.16.5
        optimizer.backward_prologue()
    elif optimizer.contiguous_gradients and optimizer.ipg_buffer is None:
        # Made by every backward(); so run one, of a loss that reaches no parameter.
        optimizer.backward(torch.zeros((), device=optimizer.device, requires_grad=True))


def _is_compact(optimizer: Any, group: int) -> bool:
    """Whether stock code sums this group itself, in one flat device buffer, and hands it over at
    the end: 0.19.8, if a 16-bit model accumulates in fp32."""
    probe = getattr(optimizer, "_use_compact_grad_partition_buffer", None)
    return probe is not None and bool(probe(group))


class PartitionedGradients(Gradients):
    """What ZeRO-1 and 2 have in common: where step() finds the window, and its norm."""

    def final(self) -> Iterable[torch.Tensor]:
        """The flat partitions that step() reads, without offload in pieces."""
        optimizer = self.optimizer
        if optimizer.cpu_offload:
            return [partition.grad for partition in optimizer.single_partition_of_fp32_groups]
        return [tensor for pieces in optimizer.averaged_gradients.values() for tensor in pieces]

    def norm(self) -> float:
        return float(self.optimizer.scaled_global_norm())

    def loss_scale(self) -> float:
        return scale_of(self.optimizer)

    def tell_overflow(self) -> Iterable[torch.Tensor]:
        """With offload the norms, which are already on the device, and not all gradients."""
        if not self.optimizer.cpu_offload:
            return self.final()
        norms: Iterable[torch.Tensor] = self.optimizer.norm_for_param_grads.values()
        return norms


class Stage1Gradients(PartitionedGradients):
    """Full local gradients: ``param.grad``, or ``param.grad_accum`` in another dtype."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        # Only for ignore_unused_parameters: false with offload. See hand_over().
        self._unused: list[int] = []
        # By which what goes to the host is divided on the way.
        self._host_divisor = 1.0
        # Up to 0.18.9 a value above 1 makes stock code keep a copy of what it offloads, for the
        # backwards to come. There are none after this reduction.
        self.optimizer.gradient_accumulation_steps = 1

    @contextmanager
    def lend(self) -> Iterator[None]:
        optimizer = self.optimizer
        params = [p for group in optimizer.bit16_groups for p in group]
        sums = [getattr(param, "grad_accum", None) for param in params]
        for param, grad in zip(params, sums):
            if grad is not None:
                param.grad_accum = grad.clone()  # large ones are reduced in place
        try:
            with super().lend():
                yield
        finally:
            if hasattr(optimizer, "clear_backward_seen_flag"):
                # From 0.18.5: the reduction left a mark, by which the next forward would drop sums.
                optimizer.clear_backward_seen_flag()
            for param, grad in zip(params, sums):
                if hasattr(param, "grad_accum"):
                    param.grad_accum = grad
            _release_averaged_gradients(optimizer)
            if optimizer.cpu_offload:
                optimizer.reset_cpu_buffers()  # norms and the overflow flag

    def local_grad(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        grad: torch.Tensor | None = self.optimizer.get_gradient_for_reduction(param)
        return grad

    def hand_over(self) -> None:
        """Reduce. Collective: one all-reduce per bucket on the data-parallel group."""
        super().hand_over()
        self.forget_unused()

    def forget_unused(self) -> None:
        """Let stock code see which parameters took no part, if it is to complain."""
        for param_id in self._unused:
            # Without a norm stock step() complains about them, as it should.
            self.optimizer.norm_for_param_grads.pop(param_id, None)
        self._unused.clear()

    def reduce(self) -> None:
        """Put what stock reduce_gradients() needs in place, on every rank alike.

        Collective with overlap_comm: an all-reduce per full bucket.
        """
        optimizer = self.optimizer
        _make_buckets(optimizer)
        # With offload stock code adds to host copies of earlier backwards unless this is 0.
        optimizer.micro_step_id = 0
        reports_unused = optimizer.cpu_offload and not optimizer.ignore_unused_parameters
        name, dtype = "grad", None
        if optimizer.use_grad_accum_attribute:
            name, dtype = "grad_accum", optimizer.gradient_accumulation_dtype
        for index, group in enumerate(optimizer.bit16_groups):
            for param in group:
                # See [Note: I2, per-parameter participation]. Zeros also keep ranks in step that
                # used different parameters: each fills the same buckets in the same order.
                if param.requires_grad and getattr(param, name) is None:
                    setattr(param, name, torch.zeros_like(param, dtype=dtype))
                    if reports_unused:
                        self._unused.append(optimizer.get_param_id(param))
                # With overlap_comm stock code reduces from the hooks of a boundary backward, and
                # reduce_gradients() does not repeat it. There was no such backward.
                if optimizer.overlap_comm and getattr(param, name) is not None:
                    optimizer.reduce_ready_partitions_and_remove_grads(param, index)

    def finalize(self, divisor: float) -> None:
        self._host_divisor = divisor
        try:
            super().finalize(divisor)
        finally:
            self._host_divisor = 1.0

    def copy(self, stock_copy: Any, param: Any, args: Any) -> None:
        """Divide an averaged gradient before stock code takes its norm and copies it to the host,
        which would have to wait for the copy before it could divide."""
        if self._host_divisor != 1.0:
            optimizer = self.optimizer
            param_id = optimizer.get_param_id(param)
            group, _, _, length = optimizer.grad_position[param_id]
            if _is_compact(optimizer, group):
                rank = dist.get_rank(group=optimizer.real_dp_process_group[group])
                part = optimizer._get_compact_grad_partition_slice(group, rank, param_id, length)
                part.div_(self._host_divisor)
            else:
                grad = optimizer.get_param_gradient_attribute(param)
                # In the optimizer's dtype, and not in the bucket where other gradients are.
                dtype = optimizer.single_partition_of_fp32_groups[group].grad.dtype
                grad.data = grad.to(dtype) / self._host_divisor
        stock_copy(param, *args)

    def divide(self, divisor: float) -> None:
        if not self.optimizer.cpu_offload:  # else copy() has done so
            super().divide(divisor)

    def close(self) -> None:
        _release_averaged_gradients(self.optimizer)

    def recover(self) -> None:
        _reset_reduction(self.optimizer)
        self._unused.clear()

    def discard(self) -> None:
        if self.optimizer.cpu_offload:
            self.optimizer.reset_cpu_buffers()  # norms and the overflow flag
        super().discard()


class Stage2AtStepGradients(Stage1Gradients):
    """ZeRO-2 that reduces once per window: its optimizer is made a ZeRO-1 optimizer, from which it
    differs only in when it reduces, and in what it therefore can forget."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        optimizer = self.optimizer
        optimizer.partition_gradients = False
        if optimizer.use_separate_grad_accum and not optimizer.use_grad_accum_attribute:
            # As a ZeRO-1 optimizer is built if sums have another dtype.
            optimizer.use_grad_accum_attribute = True
            for group in optimizer.bit16_groups:
                for param in group:
                    param.grad_accum = None
        # Its backward() goes by the ds_config, and would end each one with a reduction.
        engine.enable_backward_allreduce = False

    def averages_over_ranks(self) -> bool:
        return True

    def hand_over(self) -> None:
        mirror_boundary(self.optimizer, True)
        self.optimizer.reduce_gradients()
        self.forget_unused()


class Stage2Gradients(PartitionedGradients):
    """This rank's partition of the averaged gradients, which stock code sums."""

    reduces_in_backward = True

    def is_reduction_pending(self) -> bool:
        # Set when the first hook fills a bucket, cleared by the epilogue.
        return bool(self.optimizer.ready_for_gradients)

    @contextmanager
    def lend(self) -> Iterator[None]:
        optimizer = self.optimizer
        places = [optimizer.averaged_gradients]
        if _KEEPS_TENSORS:
            places.append(optimizer.all_grad_tensors)
        held = [dict(place) for place in places]
        try:
            yield
        finally:
            for place, before in zip(places, held):
                place.clear()  # the same dict: others have it too
                place.update(before)

    def hand_over(self) -> None:
        """Assemble the flat partitions that step() reads. No collective."""
        optimizer = self.optimizer
        mirror_boundary(optimizer, True)
        if not _KEEPS_TENSORS:
            for i in range(len(optimizer.params_in_partition)):
                if optimizer.averaged_gradients.get(i) is None:
                    optimizer.averaged_gradients[i] = self._flat_partition(i)
            return
        for i, params in enumerate(optimizer.params_in_partition):
            if not _is_compact(optimizer, i) and optimizer.all_grad_tensors.get(i) is None:
                # No backward in this window: gradients are None everywhere, which reads as zeros.
                optimizer.all_grad_tensors[i] = optimizer.get_all_grad_tensors(
                    params, optimizer.gradient_accumulation_dtype
                )
        native = getattr(optimizer, "finalize_gradient_accumulation_boundary", None)
        if native is not None:
            native()
            return
        for i in range(len(optimizer.params_in_partition)):
            optimizer.averaged_gradients[i] = self._flat_partition(i, param_group_idx=i)
            optimizer.all_grad_tensors[i] = None

    def _flat_partition(self, group: int, **further: Any) -> list[torch.Tensor]:
        optimizer = self.optimizer
        dtype = optimizer.gradient_accumulation_dtype
        device = get_accelerator().current_device_name()
        params = optimizer.params_in_partition[group]
        size = optimizer.partition_size[group]
        if not params:
            # All padding. 0.17.6-0.18.2 look at the first parameter all the same.
            return [torch.zeros(int(size), dtype=dtype, device=device)]
        flat: list[torch.Tensor] = optimizer.get_flat_partition(
            params,
            optimizer.first_offset[group],
            size,
            dtype=dtype,
            device=device,
            return_tensor_list=True,
            **further,
        )
        return flat

    def close(self) -> None:
        _release_averaged_gradients(self.optimizer)

    def recover(self) -> None:
        _reset_reduction(self.optimizer)


class Stage2OffloadGradients(Stage2Gradients):
    """Partitions summed on the host: the optimizer's gradient buffer and, from a parameter's second
    backward in a window on, a buffer in the accumulation dtype if that is another one."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        dtype = self.optimizer.gradient_accumulation_dtype
        self._sums = HostSums(dtype, self._target, self._spare)
        self._spares: dict[int, torch.Tensor] = {}
        # Of the window that is handed over.
        self._has_overflow = False

    def copy(self, stock_copy: Any, param: Any, args: Any) -> None:
        """Take the averaged gradient of a parameter that this rank owns a part of."""
        optimizer = self.optimizer
        param_id = optimizer.get_param_id(param)
        group, source_offset, _, length = optimizer.grad_position[param_id]
        if _is_compact(optimizer, group):
            stock_copy(param, *args)
            self._sums.mark(param_id)
            return
        full: torch.Tensor = optimizer.get_param_gradient_attribute(param)
        owned = full.detach().view(-1).narrow(0, source_offset, length)
        self._sums.add([(param_id, owned)])
        keep_alive(full)
        optimizer.clear_grad_attribute(param)

    def _target(self, param_id: int) -> torch.Tensor:
        group, _, offset, length = self.optimizer.grad_position[param_id]
        flat: torch.Tensor = self.optimizer.single_partition_of_fp32_groups[group].grad
        return flat.view(-1).narrow(0, offset, length)

    def _spare(self, param_id: int) -> torch.Tensor:
        if param_id not in self._spares:
            *_, length = self.optimizer.grad_position[param_id]
            dtype = self.optimizer.gradient_accumulation_dtype
            spare = torch.empty(length, dtype=dtype, device=self.optimizer.device)
            if self.optimizer.cpu_offload_pin_memory:
                spare = get_accelerator().pin_memory(spare)
            self._spares[param_id] = spare
        return self._spares[param_id]

    def hand_over(self) -> None:
        """Complete the optimizer's gradient buffer. No collective."""
        optimizer = self.optimizer
        mirror_boundary(optimizer, True)
        groups = range(len(optimizer.params_in_partition))
        if any(_is_compact(optimizer, group) for group in groups):
            # Hands over what copy() left to stock code. (0.19.4 has it for no offload at all.)
            with self._sums.copying():
                optimizer.finalize_gradient_accumulation_boundary()
        norms = self._sums.norms()
        optimizer.norm_for_param_grads.update(norms)
        # A wait, by which the copies have arrived that finalize() would wait for.
        self._has_overflow = not all_finite(list(norms.values()))
        self._sums.finalize()

    def check_overflow(self) -> None:
        # Of what stock code sums and hands over it has seen an overflow itself.
        if self._has_overflow:
            self.optimizer.local_overflow = True

    def divide(self, divisor: float) -> None:
        # On the host. What stock code copies in hand_over() nobody has waited for yet.
        self._sums.wait_for_copies()
        super().divide(divisor)
        divide_norms(self.optimizer, list(self.optimizer.norm_for_param_grads), divisor)

    def close(self) -> None:
        self._sums.forget()
        super().close()

    def discard(self) -> None:
        self.optimizer.reset_cpu_buffers()  # norms and the overflow flag
        if hasattr(self.optimizer, "_offload_accumulated_param_ids"):  # from 0.19.0
            self.optimizer._offload_accumulated_param_ids = set()
        super().discard()


def _release_averaged_gradients(optimizer: Any) -> None:
    """Drop the window's sums. Stock step() does so itself, but for 0.19.8 with offload after an
    overflow: there the next windows would be added to them."""
    for group in optimizer.averaged_gradients:
        optimizer.averaged_gradients[group] = None
    if _KEEPS_TENSORS:
        for group in optimizer.all_grad_tensors:
            optimizer.all_grad_tensors[group] = None


def gradients_for(engine: Any, *, at_step: bool) -> Gradients | None:
    """Return the gradients of a ZeRO-1/2 engine, or None if it is something else."""
    optimizer = engine.optimizer
    if type(optimizer) is not DeepSpeedZeroOptimizer:
        return None
    if not optimizer.partition_gradients:
        return Stage1Gradients(engine)
    if at_step:
        return Stage2AtStepGradients(engine)
    return Stage2OffloadGradients(engine) if optimizer.cpu_offload else Stage2Gradients(engine)


def _wrap_reduce_gradients(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    gradients: Stage1Gradients = attached(optimizer)
    gradients.reduce()
    return wrapped(*args, **kwargs)


def _wrap_reduce_independent(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    if not getattr(args[0], "ds_grad_is_ready", True):
        return None  # autograd adds the next tile to param.grad
    return wrapped(*args, **kwargs)


def _wrap_copy_grads_in_partition(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    gradients: Stage1Gradients | Stage2OffloadGradients = attached(optimizer)
    return gradients.copy(wrapped, args[0], args[1:])


def _wrap_get_gradient_for_reduction(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    (param,) = args
    return param.grad_accum


def _wrap_gradient_list(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    tensors = wrapped(*args, **kwargs)
    if not isinstance(tensors, list):
        return tensors
    return [t.to(optimizer.gradient_accumulation_dtype) for t in tensors]


def _wrap_epilogue(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    before = dict(optimizer.all_grad_tensors)
    result = wrapped(*args, **kwargs)
    for group, tensors in optimizer.all_grad_tensors.items():
        held = before.get(group)
        if held is not None and tensors is not None and tensors is not held:
            torch._foreach_add_(tensors, held)
    return result


def _of(kind: type[Gradients]) -> Callable[[Any], bool]:
    """Optimizers whose gradients are of this class."""
    return lambda optimizer: isinstance(attached(optimizer), kind)


def _sums_in_other_dtype(optimizer: Any) -> bool:
    dtype = optimizer.gradient_accumulation_dtype
    return any(param.dtype != dtype for group in optimizer.bit16_groups for param in group)


def patches() -> tuple[PatchSpec, ...]:
    """The changes to the classes that this module handles."""
    specs: tuple[PatchSpec, ...] = (
        PatchSpec(
            DeepSpeedZeroOptimizer,
            "reduce_gradients",
            "stage 1 reduces once, at step(): parameters without a gradient contribute zeros, and "
            "overlap_comm, whose hooks found no boundary, is flushed",
            _wrap_reduce_gradients,
            on_objects=_of(Stage1Gradients),
        ),
        PatchSpec(
            DeepSpeedZeroOptimizer,
            "reduce_independent_p_g_buckets_and_remove_grads",
            "sequence-tiled modules: stage 2 of 0.17.0-0.18.5 puts the gradient of every tile into "
            "the bucket, and reduces the wrong part of it",
            _wrap_reduce_independent,
            on_objects=lambda _: reduces_every_tile(deepspeed.__version__),
        ),
        PatchSpec(
            DeepSpeedZeroOptimizer,
            "copy_grads_in_partition",
            "stage 2 with offload: stock decides by global counters whether to keep, add or hand "
            "over, loses micro-batches up to 0.18.9, and never clears what an earlier window left; "
            "stage 1 with offload: what a window is divided by divides before the copy to the host",
            _wrap_copy_grads_in_partition,
            on_objects=lambda optimizer: bool(optimizer.cpu_offload),
        ),
        PatchSpec(
            DeepSpeedZeroOptimizer,
            "get_gradient_for_reduction",
            "stage 1 with another accumulation dtype, up to 0.19.7: stock averages a converted "
            "copy over ranks and updates each partition from its own rank's gradients",
            _wrap_get_gradient_for_reduction,
            on_objects=lambda optimizer: optimizer.use_grad_accum_attribute,
        ),
        PatchSpec(
            DeepSpeedZeroOptimizer,
            "get_all_grad_tensors" if _KEEPS_TENSORS else "get_flat_partition",
            "stage 2 up to 0.19.7 sums in the model's dtype even if data_types.grad_accum_dtype "
            "says otherwise",
            _wrap_gradient_list,
            on_objects=_sums_in_other_dtype,
        ),
    )
    if _KEEPS_TENSORS and not HAS_TORCH_STYLE:  # 0.17.6-0.18.2
        specs = (
            *specs,
            PatchSpec(
                DeepSpeedZeroOptimizer,
                "independent_gradient_partition_epilogue",
                "stage 2 of 0.17.6-0.18.2 keeps the gradients of the last backward only",
                _wrap_epilogue,
                on_objects=_of(Stage2Gradients),
            ),
        )
    return specs
