"""Reversible patches: apply a set of wrappers, or none, and take off exactly what was put on.

Knows nothing of DeepSpeed.

[Note: why undo goes through vars(owner)]
``getattr(owner, name)`` binds: it returns a temporary, and an inherited name looks like the owner's
own. Only the raw entry of the owner's namespace can be put back unchanged (``is``), and "there was
no entry" is a state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from .errors import PatchConflictError, UnsupportedDeepSpeedError

# wrapt's calling convention: wrapped is already bound to instance.
Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]

_ABSENT = object()


def always(_instance: object) -> bool:
    """For ``PatchSpec.on_objects``: every instance that wrap_object() is given."""
    return True


def full_name(owner: type | ModuleType, name: str) -> str:
    """The dotted name of an attribute of a class or a module."""
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{name}"
    return f"{owner.__module__}.{owner.__qualname__}.{name}"


@dataclass(frozen=True, slots=True)
class PatchSpec:
    """One change to make: wrap ``owner.name``, or add it where the owner lacks it.

    ``why`` is shown by ``status()``: one sentence on what stock code does and what changes.
    Exactly one of ``wrapper`` and ``method`` is given. With ``on_objects`` the owner itself stays
    as it is, and wrap_object() wraps the method on instances for which that is true: stock code
    calls some methods so often that the others would feel a wrapper.
    """

    owner: type | ModuleType
    name: str
    why: str
    wrapper: Wrapper | None = None
    method: Callable[..., Any] | None = None
    on_objects: Callable[[Any], bool] | None = None

    @property
    def target(self) -> str:
        return full_name(self.owner, self.name)


@dataclass(frozen=True, slots=True)
class AppliedPatch:
    """A ledger entry. ``before`` is ``_ABSENT`` where the owner had no entry of that name."""

    spec: PatchSpec
    before: object
    after: object

    def check(self) -> None:
        """Raise PatchConflictError if someone replaced our entry since it was put on."""
        if self.spec.on_objects is not None:
            return  # whatever it is now, it is not ours
        # See [Note: why undo goes through vars(owner)]
        if vars(self.spec.owner).get(self.spec.name, _ABSENT) is not self.after:
            # Restoring now would silently drop the other library's wrapper.
            raise PatchConflictError(
                f"{self.spec.target} was replaced after enable(); undo that change first, "
                "then call disable() again"
            )

    def undo(self) -> None:
        if self.spec.on_objects is not None:
            return
        if self.before is _ABSENT:
            delattr(self.spec.owner, self.spec.name)
        else:
            setattr(self.spec.owner, self.spec.name, self.before)


def _apply_one(spec: PatchSpec) -> AppliedPatch:
    before = vars(spec.owner).get(spec.name, _ABSENT)
    if spec.method is not None:
        if before is not _ABSENT:
            raise PatchConflictError(f"{spec.target} exists already and can't be added")
        after: object = spec.method
    else:
        if before is _ABSENT:
            raise UnsupportedDeepSpeedError(
                f"{spec.target} does not exist in this DeepSpeed, and unmanaged accumulation "
                f"depends on it ({spec.why}). Nothing was patched. Install a release that "
                "`python -m ds_unmanaged_gas` lists as supported"
            )
        if spec.on_objects is not None:
            return AppliedPatch(spec, before, before)
        assert spec.wrapper is not None
        after = wrapt.FunctionWrapper(before, spec.wrapper)
    setattr(spec.owner, spec.name, after)
    return AppliedPatch(spec, before, after)


def apply_all(specs: Iterable[PatchSpec]) -> tuple[AppliedPatch, ...]:
    """Apply every spec and return the ledger; on any failure put everything back and raise."""
    ledger: list[AppliedPatch] = []
    try:
        for spec in specs:  # one by one: the ledger has to hold what was done when one fails
            ledger.append(_apply_one(spec))  # noqa: PERF401
    except BaseException:
        for applied in reversed(ledger):
            applied.undo()
        raise
    return tuple(ledger)


def wrap_object(instance: object, specs: Iterable[PatchSpec]) -> None:
    """Wrap what the specs with ``on_objects`` say of this instance."""
    for spec in specs:
        if (
            spec.on_objects is not None
            and isinstance(instance, spec.owner)  # type: ignore[arg-type]
            and spec.on_objects(instance)
        ):
            assert spec.wrapper is not None
            method = getattr(instance, spec.name)
            vars(instance)[spec.name] = wrapt.FunctionWrapper(method, spec.wrapper)


def undo_all(ledger: Iterable[AppliedPatch]) -> None:
    """Put back what was there before; all or none. Raises PatchConflictError without touching
    anything if one of the entries is no longer ours."""
    entries = tuple(ledger)
    for applied in entries:
        applied.check()
    for applied in reversed(entries):
        applied.undo()
