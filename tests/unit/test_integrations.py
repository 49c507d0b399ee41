"""A library that has changed beyond recognition is an error, never a skipped patch."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import ds_unmanaged_gas
from ds_unmanaged_gas import integrations


def fake_accelerate(monkeypatch: pytest.MonkeyPatch, *, lacks: str) -> ModuleType:
    class DeepSpeedEngineWrapper:
        def backward(self) -> None: ...

    class Accelerator:
        def no_sync(self) -> None: ...

    for owner in (DeepSpeedEngineWrapper, Accelerator):
        if lacks in vars(owner):
            delattr(owner, lacks)
    modules = {name: ModuleType(name) for name in ("accelerate", "accelerate.utils.deepspeed")}
    modules["accelerate"].__version__ = "99.0"
    modules["accelerate.utils.deepspeed"].DeepSpeedEngineWrapper = DeepSpeedEngineWrapper
    modules["accelerate.accelerator"] = ModuleType("accelerate.accelerator")
    modules["accelerate.accelerator"].Accelerator = Accelerator
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules["accelerate.accelerator"]


def test_an_accelerate_with_all_seams_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_accelerate(monkeypatch, lacks="nothing")
    assert [spec.name for spec in integrations.patches_for(module)] == ["backward", "no_sync"]


@pytest.mark.parametrize("seam", ["backward", "no_sync"])
def test_an_accelerate_without_a_seam_is_refused(
    monkeypatch: pytest.MonkeyPatch, seam: str
) -> None:
    fake_accelerate(monkeypatch, lacks=seam)
    with pytest.raises(
        ds_unmanaged_gas.UnsupportedLibraryError, match=rf"accelerate 99\.0 has no \w+\.{seam},"
    ):
        integrations.patches()
