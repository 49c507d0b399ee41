"""What backward() and step() mean on an unmanaged engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import logger

from . import config, gradients, stage1_2, stage3
from .compat import mirror_boundary
from .errors import (
    BoundaryError,
    EngineRetiredError,
    RanksDifferError,
    UnsupportedConfigError,
    WindowArgumentError,
)
from .window import Window, WindowState, attach, live_engines


class UnmanagedEngine:
    """What the plugin knows about one unmanaged DeepSpeedEngine.

    [Note: stock code runs managed]
    Stock methods are called with the state that makes them do the right thing: they believe in a
    managed engine whose boundary is, for the time of step(), now. That holds on releases with a
    native unmanaged mode too, so that one set of semantics holds on all of them.
    """

    def __init__(self, options: config.Options) -> None:
        self.options = options
        self.window = Window()
        # What the caller gave to the call that is running. See counting() and stepping().
        self._num_items: float | None = None
        self._denominator: float | None = None
        self._max_grad_norm: float | None = None
        self.gradients: gradients.Gradients
        # True while a stock method runs on our behalf. See [Note: stock code runs managed].
        self.is_in_stock = False
        self.is_in_backward = False
        # True after disable(), until enable(): half of the patches would not do.
        self.is_retired = False
        # The autograd graph task of a loss.backward() whose prologue has run and whose end has not.
        self._torch_style_task: int | None = None
        # Set by the prologue too, cleared by _settle_torch_style().
        self._may_have_late_phases = False
        self._warned_empty_step = False
        self._warned_unsaved = False
        # Gives the norm of the last update, where stock code doesn't itself. See report_norm().
        self.measured_norm: Callable[[], Any] | None = None
        # By which the stock engine clipped in the update that is running, where it does that.
        self.clip_norm: torch.Tensor | None = None
        # Whether a backward has ended since the throughput timer was started. See time_forward().
        self._has_timed_backward = False
        # Samples in the windows that the throughput timer has timed.
        self.timed_samples = 0
        # Keeps what preview() handed over until end_preview() takes it back.
        self._preview: ExitStack | None = None
        # By id, from the first question on. See has().
        self._params: dict[int, Any] = {}

    def attach(self, engine: Any) -> None:
        """Take over a freshly built engine. Raises UnsupportedConfigError if its parts are ones
        for which right gradients were never shown."""
        found = (
            stage3.gradients_for(engine, at_step=self.options.reduction == "step")
            or stage1_2.gradients_for(engine, at_step=self.options.reduction == "step")
            or gradients.gradients_for(engine)
        )
        if found is None:
            raise UnsupportedConfigError(
                f'"{config.FLAG}": false is not supported with optimizer '
                f"{type(engine.optimizer).__qualname__}, whose gradients are not known here; use "
                "ZeRO stages 0 to 3 as DeepSpeed builds them, or remove the flag"
            )
        for kind in type(engine.basic_optimizer).__mro__:  # it may be the caller's own
            against = config.against_optimizer(kind.__name__)
            if against is not None:
                raise UnsupportedConfigError(
                    f'"{config.FLAG}": false is not supported with {against}'
                )
        folding = getattr(engine, "_autoep_folding_spec", None)
        if folding is not None and folding.tp_size > 1:
            raise UnsupportedConfigError(
                f'"{config.FLAG}": false is not supported with expert parallelism folded into '
                "tensor parallelism: its gradient correction runs at boundaries; set the tensor "
                "parallel size to 1"
            )
        self.gradients = found
        if engine.optimizer is not None:
            attach(engine.optimizer, found)
            # Built as True. A backward that doesn't pass through engine.forward() would read it.
            mirror_boundary(engine.optimizer, False)
        attach(engine.tput_timer, self)
        live_engines.add(engine)

    def require_enabled(self) -> None:
        """Raise EngineRetiredError after ``disable()``."""
        if self.is_retired:
            raise EngineRetiredError(
                f'this engine was built with "{config.FLAG}": false, and '
                "ds_unmanaged_gas.disable() was called since; call enable() again, or build a new "
                "engine"
            )

    @contextmanager
    def stock(self) -> Iterator[None]:
        """Run stock code as on a managed engine. See [Note: stock code runs managed]."""
        before, self.is_in_stock = self.is_in_stock, True
        try:
            yield
        finally:
            self.is_in_stock = before

    def backward(
        self,
        stock_backward: Callable[..., Any],
        engine: Any,
        loss: Any,
        *,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        **_without_effect: Any,  # 0.15: allreduce_gradients and release_loss
    ) -> Any:
        """engine.backward(): accumulate this micro-batch. Returns the loss, divided by the
        configured GAS if ``scale_wrt_gas``."""
        self.require_enabled()
        self._require_scalar(loss)
        num_items = self._require_items()
        if self.gradients.reduces_in_backward:
            self.announce(engine, "backward()")
        self.window.require_usable()
        self.end_preview()
        self._settle_torch_style(engine)
        # Up to 0.18.2 an attribute of the engine wins over the argument, if it is not None.
        override = engine.scale_wrt_gas
        if override is not None:
            scale_wrt_gas = override
        gas = engine.gradient_accumulation_steps()
        if scale_wrt_gas and self.options.gradient_scale == "gas" and gas != 1:
            loss = loss / gas
        stock_loss = self.gradients.scale_loss(loss)
        self.is_in_backward = True
        engine.scale_wrt_gas = None
        try:
            with self.stock(), self.gradients.backward(retain_graph=retain_graph):
                # Scaled already: releases differ in which of their hooks honours this argument.
                stock_backward(stock_loss, retain_graph=retain_graph, scale_wrt_gas=False)
        except BaseException as error:
            self._abandon_backward(engine, error)
            raise
        finally:
            self.is_in_backward = False
            engine.scale_wrt_gas = override
            if hasattr(engine, "_scale_wrt_gas"):
                # 0.18.4-0.19.5 would keep it for later calls of loss.backward().
                engine._scale_wrt_gas = True
        self._end_backward(engine, num_items)
        return loss

    @staticmethod
    def _require_scalar(loss: Any) -> None:
        if not isinstance(loss, torch.Tensor):
            raise WindowArgumentError(f"backward() of {loss!r}, which is no tensor")
        if loss.numel() != 1:
            raise WindowArgumentError(
                f"backward() of a tensor of shape {tuple(loss.shape)}: a loss has one element; "
                "call sum() or mean() first"
            )
        if not loss.requires_grad:
            raise WindowArgumentError(
                "backward() of a loss that requires no gradient; was it computed under no_grad()?"
            )

    def _require_items(self) -> float:
        """The items of the micro-batch whose backward begins."""
        if self._num_items is None and self.options.gradient_scale == "num_items":
            raise WindowArgumentError(
                f'with ds_config["{config.BLOCK}"]["gradient_scale"] = "num_items" every backward '
                "has to say how many items it has: "
                "accumulation(engine).backward(loss, num_items=...)"
            )
        return self._num_items or 0.0

    @contextmanager
    def counting(self, num_items: float | None) -> Iterator[None]:
        """Let the backward() inside count these items."""
        self._num_items = num_items
        try:
            yield
        finally:
            self._num_items = None

    @contextmanager
    def stepping(self, denominator: float | None, max_grad_norm: float | None) -> Iterator[None]:
        """Let the step() inside divide and clip by these."""
        self._denominator, self._max_grad_norm = denominator, max_grad_norm
        try:
            yield
        finally:
            self._denominator = self._max_grad_norm = None

    def _abandon_backward(self, engine: Any, error: BaseException) -> None:
        """Leave nothing half done in the engine that the next backward would trip over."""
        # See [Note: I5, no silent partial window]
        self.window.fail("an exception in backward()", error)
        self._end_stock_backward(engine)

    def _end_stock_backward(self, engine: Any) -> None:
        """Let stock code believe that no backward is running, after one that an exception ended."""
        if hasattr(engine, "_running_engine_backward"):  # up to 0.19.5 it stays set
            engine._running_engine_backward = False
        if hasattr(engine.optimizer, "_backward_active_depth"):
            engine.optimizer._backward_active_depth = 0
        if hasattr(engine.optimizer, "_remaining_grad_acc_hooks"):
            # 0.18.3 and 0.18.4 count down to the end of a loss.backward().
            engine.optimizer._remaining_grad_acc_hooks = 0
        self._reset_hook_state(engine)

    def begin_torch_style(self, engine: Any) -> None:
        """A loss.backward() reached an output of this engine."""
        task = torch._C._current_graph_task_id()
        if task != self._torch_style_task:
            self._require_items()
            if self.gradients.reduces_in_backward:
                self.announce(engine, "backward()")
            self.window.require_usable()
            self.end_preview()
            self._settle_torch_style(engine)
        self._torch_style_task = task
        self._may_have_late_phases = True
        optimizer = engine.optimizer
        if getattr(optimizer, "_backward_active_depth", 0) > 1:
            # One prologue per forward that the loss depends on, one epilogue per backward: with
            # two forwards 0.19.6-0.19.8 wait for a second epilogue that never comes.
            optimizer._backward_active_depth = 1

    def refuse_torch_style(self, _grad: torch.Tensor) -> None:
        """Gradient hook on the outputs of forward(): before 0.18.3 stock code ends a backward in
        engine.backward() only, and a loss.backward() would leave gradients half reduced."""
        if not self.is_in_backward:
            raise BoundaryError(
                "loss.backward() is not supported by this DeepSpeed (it is from 0.18.3 on); call "
                "engine.backward(loss). Nothing was accumulated"
            )

    def end_torch_style(self, engine: Any) -> None:
        """The stock epilogue of a loss.backward() has run."""
        if self._torch_style_task is not None or self._has_one_epilogue(engine):
            self._end_backward(engine)
        self._torch_style_task = None

    @staticmethod
    def _has_one_epilogue(engine: Any) -> bool:
        """0.18.4 runs it after each phase of a reentrant checkpoint, later releases once."""
        return hasattr(engine.optimizer, "queue_post_backward_callback")

    def _settle_torch_style(self, engine: Any) -> None:
        """Complete the last loss.backward(), or fail the window if an exception ended it.

        0.18.3 and 0.18.4 end it after its first autograd phase. What a reentrant checkpoint
        computes in later ones would wait in the buckets for ever, or be counted twice. Collective
        on stages 2 and 3: one reduction, if there was such a phase.
        """
        is_pending = self._may_have_late_phases and self.gradients.is_reduction_pending()
        if self._torch_style_task is not None or (is_pending and self._has_one_epilogue(engine)):
            # See [Note: I5, no silent partial window]
            self.window.fail("a loss.backward() that did not end", None)
            self.window.require_usable()
        if is_pending:
            with self.stock():
                engine.allreduce_gradients()
        self._may_have_late_phases = False

    def _end_backward(self, engine: Any, num_items: float = 0.0) -> None:
        self.window.record_backward(num_items)
        self._has_timed_backward = True
        self._reset_hook_state(engine)
        if engine.wall_clock_breakdown():
            engine.timers.log(engine.engine_timers.micro_timers)

    def time_forward(self, engine: Any) -> None:
        """Before a forward(), which starts the throughput timer: stop it, if a backward has ended
        since it was started. A managed engine's step() does so after each backward. Here it waits
        for the next forward() or step(), since stopping waits for the device."""
        if self._has_timed_backward:
            self._has_timed_backward = False
            engine.tput_timer.stop(global_step=False, report_speed=False)

    @staticmethod
    def _reset_hook_state(engine: Any) -> None:
        """Make the next backward start afresh; from 0.18.5 stock code waits for a forward to do
        so, and a backward without one would find the last one's epilogue done."""
        clear = getattr(engine.optimizer, "clear_backward_seen_flag", None)
        if clear is not None:
            clear()

    def step(self, stock_step: Callable[..., Any], engine: Any, args: Any, kwargs: Any) -> Any:
        """engine.step(): finalize the window and apply exactly one update."""
        self.require_enabled()
        self.announce(engine, "step()")
        self._require_readable(engine, "step()")
        divisor = self._divisor(engine)
        window = self.window
        if window.state is WindowState.EMPTY and not self._warned_empty_step:
            self._warned_empty_step = True
            logger.warning(
                "step() without a backward() since the last step(): all gradients are zero on this "
                "rank. The optimizer update and the learning rate schedule go on. "
                "This is said once per engine."
            )
        if window.state is WindowState.EMPTY:
            _prime_grad_scalers(engine)
        failure = "an exception in step(), which may have updated some parameters,"
        with self._at_boundary(engine, failure), self._clipping(engine):
            self.gradients.finalize(divisor)
            self._time_step(engine)
            result = stock_step(*args, **kwargs)
        self.gradients.close()
        self._reset_hook_state(engine)
        window.close()
        return result

    def _require_readable(self, engine: Any, call: str) -> None:
        """Raise unless the window is complete as it is."""
        self.window.require_usable()
        self.end_preview()
        if getattr(engine, "inside_no_sync_ctxt", False):
            raise BoundaryError(
                f"{call} inside no_sync(): the gradients of this window would not be averaged over "
                "ranks; leave the no_sync() block first"
            )

    def grad_norm(self, engine: Any) -> float:
        """The global norm that the next step() will report. Leaves the window as it is.

        Collective: those of step(), up to the norm, and one all-reduce of one number.
        """
        self.require_enabled()
        self.announce(engine, "grad_norm()")
        self._require_readable(engine, "grad_norm()")
        divisor = self._divisor(engine)
        gradients = self.gradients
        with self._at_boundary(engine, _FAILED_READING), gradients.lend():
            gradients.hand_over()
            # First of all: the optimizers replace a norm that is not finite by one that is.
            is_bad = not all(bool(t.isfinite().all()) for t in gradients.tell_overflow())
            (num_bad,) = _sum_over_ranks(engine, [float(is_bad)], None)
            if num_bad:
                return math.inf
            return gradients.norm() / gradients.loss_scale() / divisor

    @contextmanager
    def _at_boundary(self, engine: Any, failure: str) -> Iterator[None]:
        """Put stock code at the boundary, where an exception fails the window."""
        # See [Note: I1, the boundary is step()]
        try:
            self._settle_torch_style(engine)
            with self.window.boundary(), self.stock():
                yield
        except BaseException as error:
            # See [Note: I5, no silent partial window]
            self.window.fail(failure, error)
            raise
        finally:
            if engine.optimizer is not None:
                # Stays True in stock code until the next backward through engine.forward().
                mirror_boundary(engine.optimizer, False)

    def has(self, param: Any) -> bool:
        """Whether a parameter is one of this engine's."""
        if not self._params:
            self._params = {id(each): each for each in self.gradients.params}
        return id(param) in self._params

    def full_grad(self, stock_getter: Callable[..., Any], param: Any) -> torch.Tensor | None:
        """safe_get_full_grad(): of an empty window zeros. Collective."""
        engine = self.gradients.engine
        if self.gradients.reduces_in_backward:
            self.preview()  # one for all parameters
            full: torch.Tensor | None = stock_getter(param)
            return full
        self._require_readable(engine, "safe_get_full_grad()")
        if is_moe_param(param):
            raise UnsupportedConfigError(
                "safe_get_full_grad() is not supported for the experts (MoE) of an open window at "
                "ZeRO stages 0 and 1"
            )
        self._settle_torch_style(engine)
        shape = getattr(param, "ds_shape", param.shape)  # at stage 3 it may be released
        total = torch.zeros(shape, dtype=torch.float32, device=param.device)
        local = self.gradients.local_grad(param)
        if local is not None:
            total.add_(local.view_as(total))  # some sums are flat
        if self.gradients.averages_over_ranks():
            dist.all_reduce(total, group=engine.seq_data_parallel_group)
            total.div_(_ranks_averaged(engine))
        return total

    def preview(self) -> None:
        """Hand the window over for stock code that reads it, until something changes it. Only where
        backward() reduces. No collective, but for a loss.backward() that is to be settled."""
        self.require_enabled()
        self.window.require_usable()
        if self._preview is not None:
            return
        engine = self.gradients.engine
        with self._at_boundary(engine, _FAILED_READING):
            self._preview = ExitStack()
            self._preview.enter_context(self.gradients.lend())
            self.gradients.hand_over()

    def end_preview(self) -> None:
        """Take back what preview() handed over."""
        if self._preview is not None:
            self._preview.close()
            self._preview = None

    def _divisor(self, engine: Any) -> float:
        """What this window's gradients, averaged over ranks, are still to be divided by.

        Collective if something is counted over ranks: one all-reduce of two numbers. Raises
        WindowArgumentError, on every rank, if there are no items to divide by.
        """
        scale = self.options.gradient_scale
        if scale not in ("num_backwards", "num_items"):
            return self._denominator or 1.0
        window = self.window
        total = self._denominator
        if total is None:
            counts = [float(window.num_backwards), window.num_items]
            num_backwards, num_items = _sum_over_ranks(
                engine, counts, engine.seq_data_parallel_group
            )
            if num_backwards == 0:
                return 1.0  # nothing to divide: all gradients are zero
            total = num_items if scale == "num_items" else num_backwards
            if total == 0:
                raise WindowArgumentError(
                    f"{window.num_backwards} backwards counted num_items = 0 in all, on all ranks: "
                    "their gradients can't be divided by that; drop the window with "
                    "engine.zero_grad(), or give step(denominator=...)"
                )
        # Undoes the mean over ranks.
        return total / _ranks_averaged(engine)

    @contextmanager
    def _clipping(self, engine: Any) -> Iterator[None]:
        """Clip by this step's own norm, if it was given one."""
        if self._max_grad_norm is None:
            yield
            return
        norm = 0.0 if math.isinf(self._max_grad_norm) else self._max_grad_norm  # 0: off
        # The engine's is read at stage 0 in fp32.
        settings = [
            (engine._config, "gradient_clipping", norm),
            (engine.optimizer, "clip_grad", norm),
        ]
        if norm > 0:
            # From 0.19.7 it may be off, and then there is no norm to clip by.
            settings.append((engine.optimizer, "compute_grad_norm", True))
        settings = [each for each in settings if hasattr(*each[:2])]
        before = [getattr(holder, name) for holder, name, _ in settings]
        for setting in settings:
            setattr(*setting)
        try:
            yield
        finally:
            for (holder, name, _), value in zip(settings, before):
                setattr(holder, name, value)

    def announce(self, engine: Any, call: str) -> None:
        """With check_ranks, compare what all ranks are about to call.

        Collective: one all-reduce of three numbers per rank. Raises RanksDifferError on every rank,
        but on those whose window has failed, which go on to say so themselves.
        """
        if not self.options.check_ranks:
            return
        window = self.window
        has_failed = window.state is WindowState.FAILED
        row = [float(_CALLS.index(call)), float(window.num_backwards), float(has_failed)]
        rank, world_size = dist.get_rank(), dist.get_world_size()
        everyone = [0.0] * (3 * world_size)
        everyone[3 * rank : 3 * rank + 3] = row
        rows = _sum_over_ranks(engine, everyone, None)
        said = [rows[3 * i : 3 * i + 3] for i in range(world_size)]
        # At stages 0 and 1 backward() communicates nothing, and ranks may do as many as they like.
        compared = said if self.gradients.reduces_in_backward else [[r[0], r[2]] for r in said]
        failed = any(r[2] for r in said)
        if has_failed or (not failed and all(r == compared[0] for r in compared)):
            return
        states = [
            f"rank {i}: {_CALLS[int(c)]} after {int(n)} backwards" + (", failed" if f else "")
            for i, (c, n, f) in enumerate(said)
        ]
        raise RanksDifferError(
            f"ranks are about to do different things: {'; '.join(states)}. Nothing was done. On "
            "ZeRO stages 2 and 3 every rank has to make the same calls; where one has no data, "
            "let it run a backward() of a loss times zero. engine.zero_grad() drops the window"
        )

    def warn_of_unsaved_window(self) -> None:
        """A checkpoint has no place for gradients that no step() has applied."""
        if self.window.state is not WindowState.EMPTY and not self._warned_unsaved:
            self._warned_unsaved = True
            logger.warning(
                f"save_checkpoint() does not save the gradients of {self.window.num_backwards} "
                "backwards that no step() has applied; whoever loads this has to repeat them. "
                "This is said once per engine."
            )

    def discard(self, engine: Any) -> None:
        """engine.zero_grad(): drop the open or failed window. No collective."""
        self.require_enabled()
        self.end_preview()
        if self._torch_style_task is not None:
            self.window.fail("a loss.backward() that did not end", None)
        if self.window.state is WindowState.FAILED:
            self._end_stock_backward(engine)
            self.gradients.recover()
        self.gradients.discard()
        self._torch_style_task, self._may_have_late_phases = None, False
        self._reset_hook_state(engine)
        self.window.close()

    def num_samples(self, engine: Any) -> int:
        """Samples in this window, over all ranks."""
        per_backward = engine.train_batch_size() // engine.gradient_accumulation_steps()
        return int(per_backward * self.window.num_backwards)

    def _time_step(self, engine: Any) -> None:
        """Let stock step() find a running timer that knows this window's batch size."""
        timer = engine.tput_timer
        self._has_timed_backward = False
        if not timer.started:  # there was no forward()
            timer.start()
        timer.batch_size = self.num_samples(engine)
        if timer.global_step_count >= timer.start_step:
            self.timed_samples += timer.batch_size

    def take_model_step(
        self, stock: Callable[..., Any], engine: Any, args: Any, kwargs: Any
    ) -> Any:
        """The optimizer update, with the counters and the norm that stock code gets wrong."""
        samples_before = engine.global_samples
        measured, tidy = self.gradients.measure_norm(), self.gradients.tidy_norm()
        self.clip_norm = None
        result = stock(*args, **kwargs)
        engine.global_samples = samples_before + self.num_samples(engine)
        self.measured_norm = measured
        if self.clip_norm is not None:
            engine._global_grad_norm = self.clip_norm
        elif tidy is not None and engine._global_grad_norm is not None:
            reported = engine._global_grad_norm
            self.measured_norm = lambda: tidy(reported)
        return result

    def report_norm(self, engine: Any) -> None:
        """Let stock code report the norm that was measured in the last update, if it was."""
        if self.measured_norm is not None:
            engine._global_grad_norm, self.measured_norm = self.measured_norm(), None


_FAILED_READING = "an exception while its gradients were read"

# What is announced with check_ranks.
_CALLS = ("forward()", "backward()", "step()", "grad_norm()")


def _ranks_averaged(engine: Any) -> float:
    """What a reduction of gradients divides by. (engine.dp_world_size is None with the mpu of
    Ulysses, from 0.17.0 on.)"""
    world_size = dist.get_world_size(group=engine.seq_data_parallel_group)
    return float(world_size / engine.sequence_parallel_size)


# Of a sum on a device without float64: its largest number, and the parts of a whole it can tell.
_LARGEST = 2**54
_PARTS = 2**40


def _sum_over_ranks(engine: Any, numbers: list[float], group: Any) -> list[float]:
    """Sums of numbers that are not negative. Whole ones are exact up to 2**53, whether or not the
    device has float64; without it others are rounded to 2**-40 on each rank.

    Collective: one all-reduce over the group, or over all ranks if it is None. Without float64
    raises WindowArgumentError on every rank if a sum is 2**54 or more.
    """
    if _has_float64():
        total = torch.tensor(numbers, dtype=torch.float64, device=engine.device)
        dist.all_reduce(total, group=group)
        return [float(number) for number in total.tolist()]
    # fp32 has 24 bits. So as integers: first the wholes, then what is left of each.
    split = [divmod(min(number, _LARGEST), 1) for number in numbers]
    parts = [int(whole) for whole, _ in split] + [round(rest * _PARTS) for _, rest in split]
    total = torch.tensor(parts, dtype=torch.int64, device=engine.device)
    dist.all_reduce(total, group=group)
    wholes, rests = total[: len(numbers)].tolist(), total[len(numbers) :].tolist()
    if max(wholes) >= _LARGEST:
        raise WindowArgumentError(
            f"{max(wholes)} items or more in all: this device has no float64 and can't count them; "
            "count in larger units"
        )
    return [float(whole + rest / _PARTS) for whole, rest in zip(wholes, rests)]


def _has_float64() -> bool:
    ask = getattr(get_accelerator(), "is_fp64_supported", None)  # from 0.19.6
    return ask is None or bool(ask())


def _prime_grad_scalers(engine: Any) -> None:
    """Let fp16 autocast step without a loss: its GradScalers start up with the first one."""
    at_stage0 = getattr(engine, "torch_autocast_z0_gradscaler", None)  # from 0.18.0
    of_optimizer = getattr(engine.optimizer, "torch_autocast_gradscaler", None)  # from 0.17.2
    for scaler in (at_stage0, of_optimizer):
        if scaler is not None:
            scaler.scale(torch.zeros((), device=engine.device))
