"""What a caller can ask of an accumulation window beyond backward() and step()."""

from __future__ import annotations

import math
from typing import Any

from .config import FLAG
from .errors import UnsupportedConfigError, WindowArgumentError
from .window import WindowState, attached


class AccumulationWindow:
    """The accumulation window of one unmanaged engine: all backwards since its last ``step()``.

    Got from ``accumulation(engine)``. ``engine.backward()``, ``engine.step()`` and
    ``engine.zero_grad()`` stay the primary surface: this is for what they have no argument for.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._state = attached(engine)

    @property
    def state(self) -> WindowState:
        """EMPTY, OPEN or FAILED."""
        state: WindowState = self._state.window.state
        return state

    @property
    def num_backwards(self) -> int:
        """Complete backwards of this rank in the window."""
        return int(self._state.window.num_backwards)

    @property
    def num_samples(self) -> int:
        """Samples in the window, over all ranks, if each did as many backwards as this one."""
        return int(self._state.num_samples(self._engine))

    @property
    def num_items(self) -> float:
        """Items (tokens, sequences: whatever the caller counts) of this rank in the window."""
        return float(self._state.window.num_items)

    def backward(self, loss: Any, *, num_items: Any = None, **kwargs: Any) -> Any:
        """``engine.backward(loss)`` without division by GAS, counting ``num_items`` items.

        ``num_items`` is a number or a tensor of one element, finite and not negative; zero for a
        micro-batch that has none. Other arguments go to ``engine.backward()``. Returns the loss.

        Raises WindowArgumentError for a malformed argument, before anything is accumulated.
        Issues the collectives of ``engine.backward()``.
        """
        items = None if num_items is None else _number("num_items", num_items, zero=True)
        with self._state.counting(items):
            return self._engine.backward(loss, **{"scale_wrt_gas": False, **kwargs})

    def step(self, *, denominator: Any = None, max_grad_norm: Any = None, **kwargs: Any) -> None:
        """``engine.step()`` with a divisor and a clip value of its own.

        ``denominator``, a finite number above zero and the same on every rank, divides this
        window's gradients before the norm, the clip and the overflow check. With
        ``"gradient_scale": "num_items"`` or ``"num_backwards"`` it takes the place of the number
        that was counted over all ranks; otherwise it divides the mean over ranks of the sums.
        ``max_grad_norm`` takes the place of ``gradient_clipping`` for this step; 0 or infinity
        turns clipping off. Other arguments go to ``engine.step()``.

        Raises WindowArgumentError for a malformed argument or, with ``"num_items"``, if no rank
        counted any item; the window stays as it is. Issues the collectives of ``engine.step()``.
        """
        divisor = None if denominator is None else _number("denominator", denominator)
        clip = None
        if max_grad_norm is not None:
            clip = _number("max_grad_norm", max_grad_norm, zero=True, infinite=True)
        with self._state.stepping(divisor, clip):
            self._engine.step(**kwargs)

    def grad_norm(self) -> float:
        """The global gradient norm that the next ``step()`` will report: of the mean over ranks,
        divided as this window's step will divide (without a ``denominator`` of its own), without
        the loss scale and before clipping. Infinite if a gradient is not finite.

        The window stays as it is, bit for bit; there may be more backwards. At stages 0 and 1 this
        takes a temporary copy of the local gradients and issues the reduction that ``step()`` will
        issue again; at stages 2 and 3 a few all-reduces of one number. Every rank has to call it.

        Raises WindowFailedError for a failed window, and BoundaryError inside ``no_sync()``.
        """
        return float(self._state.grad_norm(self._engine))

    def discard(self) -> None:
        """Drop the window, open or failed, as ``engine.zero_grad()`` does. No collective."""
        self._engine.zero_grad()


def _number(name: str, value: Any, *, zero: bool = False, infinite: bool = False) -> float:
    """The value as a float, or WindowArgumentError."""
    wanted = f"a {'' if infinite else 'finite '}number {'of at least' if zero else 'above'} 0"
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        number = float(value)  # of a tensor of one element, too
    except (TypeError, ValueError, RuntimeError):
        raise WindowArgumentError(f"{name} = {value!r} is not {wanted}") from None
    if math.isnan(number) or (math.isinf(number) and not infinite):
        raise WindowArgumentError(f"{name} = {value!r} is not {wanted}")
    if number < 0 or (number == 0 and not zero):
        raise WindowArgumentError(f"{name} = {value!r} is not {wanted}")
    return number


def accumulation(engine: Any) -> AccumulationWindow:
    """The accumulation window of an unmanaged engine.

    Raises UnsupportedConfigError for an engine that is managed, or was built before ``enable()``.
    """
    if attached(engine) is not None:
        return AccumulationWindow(engine)
    params = getattr(getattr(engine, "_config", None), "_param_dict", {})
    if params.get(FLAG, True) is False:
        raise UnsupportedConfigError(
            f'this engine has "{FLAG}": false, but was built before ds_unmanaged_gas.enable(); '
            "call enable() first, then deepspeed.initialize()"
        )
    raise UnsupportedConfigError(
        f'this engine is managed: its ds_config has "{FLAG}" = {params.get(FLAG, True)!r}; set it '
        "to false to own the window"
    )
