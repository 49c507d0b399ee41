from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import wrapt

from ds_unmanaged_gas.errors import PatchConflictError, UnsupportedDeepSpeedError
from ds_unmanaged_gas.patching import PatchSpec, always, apply_all, undo_all, wrap_object


def doubling(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return 2 * wrapped(*args, **kwargs)


@pytest.fixture
def target() -> type:
    class Base:
        def inherited(self) -> int:
            return 5

    class Target(Base):
        def one(self) -> int:
            return 1

        @classmethod
        def two(cls) -> int:
            return 2

        @staticmethod
        def three() -> int:
            return 3

    return Target


def namespace(owner: type) -> dict[str, Any]:
    return dict(vars(owner))


def test_apply_and_undo_leave_the_namespace_identical(target: Any) -> None:
    before = namespace(target)
    names = ("one", "two", "three")
    ledger = apply_all([PatchSpec(target, name, "why", doubling) for name in names])
    assert [target().one(), target.two(), target.three()] == [2, 4, 6]
    undo_all(ledger)
    after = namespace(target)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_added_method_is_removed_again(target: Any) -> None:
    ledger = apply_all([PatchSpec(target, "four", "why", method=lambda self: 4)])
    assert target().four() == 4
    undo_all(ledger)
    assert not hasattr(target, "four")


@pytest.mark.parametrize("name", ["missing", "inherited"])
def test_missing_seam_is_an_error_and_nothing_stays_patched(target: Any, name: str) -> None:
    """A name that is only inherited is no seam of this class: patching it would plant a new one."""
    before = namespace(target)
    with pytest.raises(UnsupportedDeepSpeedError, match=rf"Target\.{name} .*because"):
        apply_all(
            [
                PatchSpec(target, "one", "why", doubling),
                PatchSpec(target, name, "because", doubling),
            ]
        )
    assert namespace(target) == before
    assert vars(target)["one"] is before["one"]


def test_failure_halfway_rolls_back(target: Any) -> None:
    before = namespace(target)

    class Unwritable(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise TypeError("read-only class")

    class Fixed(metaclass=Unwritable):
        def one(self) -> int:
            return 1

    with pytest.raises(TypeError, match="read-only"):
        apply_all(
            [PatchSpec(target, "one", "why", doubling), PatchSpec(Fixed, "one", "", doubling)]
        )
    assert vars(target)["one"] is before["one"]


def test_adding_what_exists_is_a_conflict(target: Any) -> None:
    with pytest.raises(PatchConflictError, match="exists already"):
        apply_all([PatchSpec(target, "one", "why", method=lambda self: 0)])


def foreign(owner: type, name: str, change: Callable[[int], int]) -> None:
    """What another library does: wrap whatever is there."""

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> int:
        return change(wrapped(*args, **kwargs))

    setattr(owner, name, wrapt.FunctionWrapper(vars(owner)[name], wrapper))


def test_foreign_wrapper_below_ours_survives(target: Any) -> None:
    foreign(target, "one", lambda x: x + 10)
    theirs = vars(target)["one"]
    ledger = apply_all([PatchSpec(target, "one", "why", doubling)])
    assert target().one() == 22
    undo_all(ledger)
    assert vars(target)["one"] is theirs
    assert target().one() == 11


def test_foreign_wrapper_above_ours_is_a_conflict_that_undoes_nothing(target: Any) -> None:
    ledger = apply_all(
        [PatchSpec(target, "one", "why", doubling), PatchSpec(target, "three", "why", doubling)]
    )
    foreign(target, "one", lambda x: x + 10)
    theirs = vars(target)["one"]
    with pytest.raises(PatchConflictError, match=r"Target\.one was replaced"):
        undo_all(ledger)
    assert [target().one(), target.three()] == [12, 6]
    target.one = ledger[0].after  # the other library takes its wrapper off
    assert theirs is not ledger[0].after
    undo_all(ledger)
    assert [target().one(), target.three()] == [1, 3]


def test_method_is_wrapped_on_one_object_only(target: Any) -> None:
    before = namespace(target)
    specs = [PatchSpec(target, "one", "why", doubling, on_objects=always)]
    ledger = apply_all(specs)
    wrapped, other = target(), target()
    wrap_object(wrapped, specs)
    wrap_object(ledger, specs)  # of another class: stays as it is
    assert [wrapped.one(), other.one()] == [2, 1]
    assert namespace(target) == before
    foreign(target, "one", lambda x: x + 10)  # not our concern: nothing of ours is there
    undo_all(ledger)
    assert other.one() == 11


def test_wrapper_for_objects_is_told_the_object(target: Any) -> None:
    instances = []

    def noting(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        instances.append(instance)
        return wrapped(*args, **kwargs)

    owner = target()
    wrap_object(owner, [PatchSpec(target, "one", "why", noting, on_objects=always)])
    assert owner.one() == 1
    assert instances == [owner]


def test_missing_method_of_objects_is_an_error_too(target: Any) -> None:
    with pytest.raises(UnsupportedDeepSpeedError, match=r"Target\.missing"):
        apply_all([PatchSpec(target, "missing", "why", doubling, on_objects=always)])
