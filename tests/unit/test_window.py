from __future__ import annotations

import pytest

from ds_unmanaged_gas.errors import WindowFailedError
from ds_unmanaged_gas.window import Window, WindowState, attach, attached


def test_window_opens_with_the_first_backward_and_closes_empty() -> None:
    window = Window()
    assert (window.state, window.num_backwards) == (WindowState.EMPTY, 0)
    window.record_backward()
    window.record_backward()
    assert (window.state, window.num_backwards) == (WindowState.OPEN, 2)
    window.close()
    assert (window.state, window.num_backwards) == (WindowState.EMPTY, 0)


def test_boundary_is_true_inside_the_block_only() -> None:
    window = Window()
    assert not window.is_boundary
    with window.boundary():
        assert window.is_boundary
    assert not window.is_boundary


def test_boundary_is_false_after_an_exception() -> None:
    window = Window()
    with pytest.raises(ZeroDivisionError), window.boundary():
        raise ZeroDivisionError
    assert not window.is_boundary


def test_failed_window_names_its_first_cause_until_it_is_closed() -> None:
    window = Window()
    window.record_backward()
    window.require_usable()
    cause = MemoryError("out of memory")
    window.fail("an exception in backward()", cause)
    window.fail("an exception in step()", ValueError())
    assert window.state is WindowState.FAILED
    with pytest.raises(WindowFailedError, match=r"in backward\(\).*zero_grad\(\)") as caught:
        window.require_usable()
    assert caught.value.__cause__ is cause
    window.close()
    assert window.state is WindowState.EMPTY
    window.require_usable()


def test_state_belongs_to_its_owner_alone() -> None:
    class Owner:
        pass

    one, other, state = Owner(), Owner(), object()
    attach(one, state)
    assert attached(one) is state
    assert attached(other) is None
