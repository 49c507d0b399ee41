"""Where gradients wait between backward() and step(): the base, and what is not ZeRO.

Covers stage 0 (a bare torch optimizer, FP16_Optimizer, FP16_UnfusedOptimizer) and BF16_Optimizer,
which DeepSpeed uses for stage 1 when a bf16 model accumulates in fp32.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import get_global_norm_of_tensors, is_model_parallel_parameter

from .errors import UnsupportedConfigError
from .offload import norms_of
from .patching import PatchSpec, always
from .window import attached

# From 0.18.3 on stock code calls loss.backward() itself, and no more the optimizer's backward();
# it then follows a loss.backward() of the caller too.
HAS_TORCH_STYLE = hasattr(ZeROOptimizer, "scale_if_loss")

# Up to 0.16.4, where backward() takes it as any other keyword.
_ENGINE_FORGETS_RETAIN_GRAPH = not HAS_TORCH_STYLE and (
    "retain_graph" not in inspect.signature(BF16_Optimizer.backward).parameters
)

# Stock methods that are not wrapped, but whose effect is counted on. See fingerprints.py.
COUNTED_ON = (
    (
        BF16_Optimizer,
        ("backward", "clear_lp_grads", "clear_hp_grads", "get_grads_for_reduction", "step"),
    ),
    (FP16_Optimizer, ("backward", "step")),
    (FP16_UnfusedOptimizer, ("backward", "step")),
)


def scale_of(optimizer: Any) -> float:
    """The loss scale of one of DeepSpeed's optimizers. None where there is nothing to scale: so
    says FP16_Optimizer of a bf16 model."""
    scale = optimizer.loss_scale
    return 1.0 if scale is None else float(scale)


class Gradients:
    """The gradients of one unmanaged engine. Subclasses say where they are and how they reach the
    optimizer; this one leaves them in ``param.grad`` and reduces them all at step().

    [Note: I2, per-parameter participation]
    Per parameter, the first contribution in a window replaces what the buffers held, each later one
    adds, and a parameter without one contributes zero. Nothing else decides: no global micro-step
    counter, no count of forwards.
    """

    reduces_in_backward = False
    """Whether every backward() issues collectives, so that all ranks have to do the same."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer: Any = engine.optimizer
        # Walking through all modules takes longer than what is done with a small parameter.
        self.params = tuple(engine.module.parameters())

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Apply a loss scale that stock backward() forgets; the identity where it doesn't."""
        return loss

    @contextmanager
    def backward(self, *, retain_graph: bool) -> Iterator[None]:  # noqa: ARG002
        """Surround one engine.backward()."""
        yield

    def is_reduction_pending(self) -> bool:
        """Whether gradients wait in a bucket that the last backward should have reduced."""
        return False

    def finalize(self, divisor: float) -> None:
        """Complete the window: hand it to the optimizer, divided. Called inside step(), at the
        boundary, on every rank. Issues the collectives of hand_over()."""
        self.hand_over()
        self.check_overflow()
        if divisor != 1.0:
            self.divide(divisor)

    def hand_over(self) -> None:
        """Put the gradients where the optimizer reads them.

        Collective: one all-reduce per bucket on the data-parallel group.
        """
        if self.averages_over_ranks():
            self.engine.allreduce_gradients()

    def averages_over_ranks(self) -> bool:
        """Whether hand_over() does. Not where the caller, or another part of the engine, does."""
        return bool(self.engine.enable_backward_allreduce)

    def final(self) -> Iterable[torch.Tensor]:
        """The gradients that the optimizer will read, each element once. After hand_over()."""
        return [p.grad for p in self.params if p.grad is not None]

    def check_overflow(self) -> None:
        """Tell the optimizer of an overflow that it would not find itself. After hand_over(). No
        collective."""

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Surround a hand_over() that no update follows: the window goes on, bit for bit."""
        held = [(param, param.grad) for param in self.params]
        for param, grad in held:
            param.grad = None if grad is None else grad.clone()  # it is reduced in place
        try:
            yield
        finally:
            for param, grad in held:
                param.grad = grad

    def norm(self) -> float:
        """The global norm of the handed over gradients, still times the loss scale. Collective: as
        many all-reduces of one number as the optimizer's own step() makes for it."""
        return float(self._norm()())

    def _norm(self) -> Callable[[], torch.Tensor]:
        """Read all ``param.grad``, and return a function that gives their norm, a 0-dim fp32
        tensor. Collective with an mpu: one model-parallel all-reduce, before it returns."""
        mpu = self.engine.mpu
        shares_model = mpu is not None and mpu.get_model_parallel_rank() != 0
        grads: list[torch.Tensor] = []
        for param in self.params:
            grad = param.grad
            if grad is None or (shares_model and not is_model_parallel_parameter(param)):
                continue  # rank 0 has what is not model-parallel
            grads.append(grad.coalesce().values() if grad.is_sparse else grad)
        norms = norms_of(grads, torch.float32)
        if mpu is None and norms:
            return lambda: torch.linalg.vector_norm(torch.stack(norms))
        square = torch.zeros((), device=self.engine.device)
        if norms:
            square = torch.stack(norms).square().sum()
        if mpu is not None:
            dist.all_reduce(square, group=mpu.get_model_parallel_group())
        norm = square.sqrt()
        return lambda: norm

    def loss_scale(self) -> float:
        """What the gradients are too large by."""
        return 1.0

    def tell_overflow(self) -> Iterable[torch.Tensor]:
        """Something to look at for infinities and NaNs. After hand_over()."""
        return self.final()

    def local_grad(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """What this rank has summed of a parameter, not averaged over ranks. Only where backward()
        does not reduce."""
        return param.grad

    def divide(self, divisor: float) -> None:
        """Divide the window's gradients. Called at the boundary, after hand_over(): the norm, the
        clip and the overflow check see the result. No collective."""
        for tensor in self.final():
            tensor.div_(divisor)

    def close(self) -> None:
        """Leave nothing of the window behind. Called when step() ends."""
        # bf16 at stage 0 of DeepSpeed 0.17.6-0.18.5 never clears them: they would pile up.
        for param in self.params:
            param.grad = None

    def recover(self) -> None:
        """Undo what an exception left half done in backward() or step(), so that discard() can do
        the rest. No collective."""

    def discard(self) -> None:
        """Drop what the open window has summed, in every place where it is. No collective."""
        if hasattr(self.optimizer, "zero_grad"):
            self.optimizer.zero_grad()
        self.close()

    def measure_norm(self) -> Callable[[], torch.Tensor] | None:
        """A function that gives the global gradient norm, or None where stock code takes one
        itself. Called at the boundary, after hand_over() and before clipping. What is given needs
        no gradient any more: few callers ask, and the device has the less to do before the update.
        """
        return None

    def tidy_norm(self) -> Callable[[Any], Any] | None:
        """A function that makes of the norm that stock code reports the one to report, or None if
        it is. Called at the boundary, before the update may change the loss scale."""
        return None


class BareGradients(Gradients):
    """A torch optimizer that DeepSpeed leaves as it is: stage 0 in fp32."""

    def measure_norm(self) -> Callable[[], torch.Tensor] | None:
        engine = self.engine
        if engine.gradient_clipping() > 0 and not (
            engine.fp16_enabled() or engine.bfloat16_enabled()
        ):
            return None  # stock code reads all gradients for a norm to clip by, and that is it
        norm, scaler = self._norm(), self._scaler()
        if scaler is None:
            return norm
        # On the device, where get_scale() would wait for it; now, since the update may change it.
        scale = scaler.scale(torch.ones((), device=engine.device))
        return lambda: norm() / scale

    def loss_scale(self) -> float:
        scaler = self._scaler()
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _scaler(self) -> Any:
        return getattr(self.engine, "torch_autocast_z0_gradscaler", None)  # from 0.18.0


class _ScaledGradient(torch.autograd.Function):
    """A loss as it is, whose backward() begins with a scale instead of 1. (In fp16 the loss times
    its scale would overflow, and cost more kernels.)"""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.scale, None


class LossScaledGradients(Gradients):
    """FP16_Optimizer and FP16_UnfusedOptimizer: local gradients, times the loss scale.

    Since 0.18.3 DeepSpeedEngine.backward() calls loss.backward() itself instead of these
    optimizers' backward(), so nobody multiplies by the scale that their step() divides by: an fp16
    stage-0 update is too small by the loss scale. Scaling here restores what step() undoes.

    They also sum in the model's dtype. DeepSpeed up to 0.18.4 picks them for bf16 with fp32
    accumulation all the same, so that is done here.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        model_dtype, accumulation_dtype = engine.get_data_types()
        self._sum_dtype = accumulation_dtype if accumulation_dtype != model_dtype else None
        # Sums of this window in that dtype. Cleared by hand_over().
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}

    @contextmanager
    def backward(self, *, retain_graph: bool) -> Iterator[None]:  # noqa: ARG002
        """Surround one engine.backward(): move its gradients into the sums, if there are any."""
        yield
        if self._sum_dtype is None:
            return
        for param in self.params:
            if param.grad is None:
                continue
            if param in self._sums:
                self._sums[param].add_(param.grad)
            else:
                self._sums[param] = param.grad.to(self._sum_dtype)
            param.grad = None

    def discard(self) -> None:
        self._sums.clear()
        super().discard()

    def hand_over(self) -> None:
        for param, total in self._sums.items():
            param.grad = total.to(param.dtype)
        self._sums.clear()
        super().hand_over()

    @contextmanager
    def lend(self) -> Iterator[None]:
        sums = dict(self._sums)
        with super().lend():
            yield
        self._sums = sums

    def local_grad(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        return self._sums.get(param, param.grad)

    def loss_scale(self) -> float:
        return scale_of(self.optimizer)

    def _scale(self) -> float:
        # Up to 0.18.2 their backward() is called. A release that mends this would give them
        # scale_if_loss(), as ZeRO optimizers have.
        if not HAS_TORCH_STYLE or hasattr(self.optimizer, "scale_if_loss"):
            return 1.0
        return self.loss_scale()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        scale = self._scale()
        return loss if scale == 1.0 else _ScaledGradient.apply(loss, scale)  # type: ignore[no-untyped-call]

    def tidy_norm(self) -> Callable[[Any], Any] | None:
        if not isinstance(self.optimizer, FP16_UnfusedOptimizer):
            return None
        scale = self.loss_scale()  # it reports the norm of the still scaled gradients
        return lambda norm: norm / scale


class BF16Gradients(Gradients):
    """BF16_Optimizer: unreduced sums in fp32, from which it updates this rank's partition."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.retain_graph = False
        device = self.optimizer.fp32_groups_flat_partition[0].device
        # Stock step() fails on a window whose norm is zero.
        self.tiny_norm = torch.full((1,), _TINY_NORM, device=device)

    @contextmanager
    def backward(self, *, retain_graph: bool) -> Iterator[None]:
        self.retain_graph = retain_graph
        yield

    def hand_over(self) -> None:
        super().hand_over()
        # Of these stock step() takes the norm: on every rank the same ones, whatever it used.
        for flags in self.optimizer.fp32_groups_has_gradients:
            flags[:] = [True] * len(flags)

    def final(self) -> Iterable[torch.Tensor]:
        flat: list[torch.Tensor] = self.optimizer.fp32_groups_gradients_flat
        return flat

    @contextmanager
    def lend(self) -> Iterator[None]:
        optimizer = self.optimizer
        sums = [flat.clone() for flat in self.final()]
        contributed = [list(flags) for flags in optimizer.fp32_groups_has_gradients]
        try:
            yield
        finally:
            for flat, held in zip(self.final(), sums):
                flat.copy_(held)
            for flags, flags_held in zip(optimizer.fp32_groups_has_gradients, contributed):
                flags[:] = flags_held

    def norm(self) -> float:
        optimizer = self.optimizer
        grads, of_experts = optimizer.get_grads_for_norm()
        if of_experts:
            raise UnsupportedConfigError(
                "grad_norm() is not supported with bf16 experts (MoE) summed in fp32; read "
                "engine.get_global_grad_norm() after step()"
            )
        norm = float(get_global_norm_of_tensors(grads, mpu=optimizer.mpu))
        return 0.0 if norm <= 2 * _TINY_NORM else norm

    def tidy_norm(self) -> Callable[[Any], Any] | None:
        return _without_tiny_norm

    def local_grad(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        optimizer = self.optimizer
        for params, grads in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients):
            for candidate, grad in zip(params, grads):
                if candidate is param:
                    return grad  # type: ignore[no-any-return]
        return None

    def discard(self) -> None:
        self.optimizer.clear_hp_grads()
        self.close()


def gradients_for(engine: Any) -> Gradients | None:
    """The class for an optimizer that is not ZeRO, or None if it is not one of ours."""
    optimizer = engine.optimizer
    if optimizer is None or type(optimizer).__name__ == "DummyOptim":
        return Gradients(engine)  # nothing to train: step() itself says so
    if type(optimizer) in (FP16_Optimizer, FP16_UnfusedOptimizer):
        return LossScaledGradients(engine)
    if type(optimizer) is BF16_Optimizer:
        return BF16Gradients(engine)
    if isinstance(optimizer, torch.optim.Optimizer):
        return BareGradients(engine)
    return None


def _wrap_bf16_backward(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    gradients: BF16Gradients = attached(optimizer)
    return wrapped(*args, **{"retain_graph": gradients.retain_graph} | kwargs)


def _wrap_update_hp_grads(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(clear_lp_grads=False)  # which would write zeros, one kernel per parameter
    for group in optimizer.bf16_groups:
        for param in group:
            param.grad = None
    return result


# Small enough that adding its square changes no norm that could matter, large enough that the
# square (2**-120) is no fp32 zero.
_TINY_NORM = 2.0**-60


def _wrap_get_grads_for_norm(wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    if not isinstance(result, tuple):
        return result  # a list means: the gradients to clip
    non_expert, expert = result
    gradients: BF16Gradients = attached(optimizer)
    return [*non_expert, gradients.tiny_norm], expert


def _without_tiny_norm(norm: Any) -> Any:
    if isinstance(norm, torch.Tensor):
        return norm.masked_fill(norm <= 2 * _TINY_NORM, 0.0)
    # With experts, and infinite in 0.19.8 after an overflow.
    return 0.0 if norm <= 2 * _TINY_NORM else norm


def patches() -> tuple[PatchSpec, ...]:
    """The changes to the classes that this module handles."""
    specs: tuple[PatchSpec, ...] = (
        PatchSpec(
            BF16_Optimizer,
            "update_hp_grads",
            "stock adds the low-precision gradients to the fp32 ones but clears them only when a "
            "new engine.forward() output is differentiated; a second loss on one forward would "
            "count the first again",
            _wrap_update_hp_grads,
            on_objects=always,
        ),
        PatchSpec(
            BF16_Optimizer,
            "get_grads_for_norm",
            "a window without gradients has an empty norm, on which stock step() fails",
            _wrap_get_grads_for_norm,
            on_objects=always,
        ),
    )
    if _ENGINE_FORGETS_RETAIN_GRAPH:
        specs = (
            *specs,
            PatchSpec(
                BF16_Optimizer,
                "backward",
                "stock passes no retain_graph on at stage 0, up to 0.16.4",
                _wrap_bf16_backward,
                on_objects=always,
            ),
        )
    return specs
