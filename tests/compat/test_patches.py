"""Once per DeepSpeed release: every seam exists, and comes back as it was."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import wrapt
from harness.pool import configure_environment
from harness.releases import DEEPSPEED
from packaging.version import Version

import ds_unmanaged_gas
from ds_unmanaged_gas import fingerprints, installer, integrations

configure_environment()

from ds_unmanaged_gas import engine, patching


@pytest.fixture(autouse=True)
def start_and_end_disabled() -> Iterator[None]:
    ds_unmanaged_gas.disable()
    yield
    ds_unmanaged_gas.disable()


with contextlib.suppress(ImportError):  # from 0.17.0; patched only if it is imported
    importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")


def all_patches() -> list[patching.PatchSpec]:
    """Some releases import Accelerate where it is installed."""
    return [*engine.patches(), *integrations.patches()]


def namespaces() -> dict[type, dict[str, Any]]:
    return {spec.owner: dict(vars(spec.owner)) for spec in all_patches()}


def assert_untouched(before: dict[type, dict[str, Any]]) -> None:
    for owner, entries in before.items():
        after = vars(owner)
        assert set(after) == set(entries)
        assert all(after[name] is entries[name] for name in entries)


def test_enable_patches_every_seam_and_says_why() -> None:
    specs = all_patches()
    status = ds_unmanaged_gas.enable()
    assert status.enabled
    assert status == ds_unmanaged_gas.status()
    assert [patch.target for patch in status.patches] == [spec.target for spec in specs]
    assert all(patch.why for patch in status.patches)
    for spec in specs:
        entry = vars(spec.owner)[spec.name]
        is_wrapped = isinstance(entry, wrapt.FunctionWrapper)
        assert is_wrapped is (spec.wrapper is not None and not spec.on_objects)
        assert is_wrapped or spec.on_objects or entry is spec.method


def test_disable_puts_back_the_very_same_objects() -> None:
    before = namespaces()
    for _ in range(2):
        ds_unmanaged_gas.enable()
        ds_unmanaged_gas.enable()
        ds_unmanaged_gas.disable()
        ds_unmanaged_gas.disable()
        assert_untouched(before)
    assert ds_unmanaged_gas.status() == ds_unmanaged_gas.Status(False, None, None, ())


def test_missing_seam_leaves_everything_unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    late = next(spec for spec in engine.patches() if spec.name == "partition_grads")
    monkeypatch.delattr(late.owner, late.name)
    before = namespaces()
    with pytest.raises(ds_unmanaged_gas.UnsupportedDeepSpeedError, match="Nothing was patched"):
        ds_unmanaged_gas.enable()
    assert_untouched(before)
    assert not ds_unmanaged_gas.status().enabled


def test_failure_halfway_rolls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces()
    real, calls = patching._apply_one, []

    def fail_at_the_fifth(spec: patching.PatchSpec) -> patching.AppliedPatch:
        calls.append(spec)
        if len(calls) == 5:
            raise MemoryError
        return real(spec)

    monkeypatch.setattr(patching, "_apply_one", fail_at_the_fifth)
    with pytest.raises(MemoryError):
        ds_unmanaged_gas.enable()
    assert_untouched(before)
    assert not ds_unmanaged_gas.status().enabled


def test_foreign_wrapper_on_top_is_reported_and_nothing_is_undone() -> None:
    before = namespaces()
    ds_unmanaged_gas.enable()
    owner = engine.DeepSpeedEngine
    ours = vars(owner)["step"]
    owner.step = wrapt.FunctionWrapper(ours, lambda wrapped, i, args, kwargs: wrapped(*args))
    with pytest.raises(ds_unmanaged_gas.PatchConflictError, match=r"DeepSpeedEngine\.step"):
        ds_unmanaged_gas.disable()
    assert ds_unmanaged_gas.status().enabled
    owner.step = ours
    ds_unmanaged_gas.disable()
    assert_untouched(before)


def test_enable_from_many_threads_patches_once() -> None:
    barrier = threading.Barrier(8)
    results: list[ds_unmanaged_gas.Status] = []

    def run() -> None:
        barrier.wait()
        results.append(ds_unmanaged_gas.enable())

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [results[0]] * 8
    for spec in all_patches():
        assert not isinstance(
            getattr(vars(spec.owner)[spec.name], "__wrapped__", None), wrapt.FunctionWrapper
        )


@pytest.mark.parametrize("version", ["0.14.5", "unknown"])
def test_unsupported_release_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    import deepspeed

    before = namespaces()
    monkeypatch.setattr(deepspeed, "__version__", version)
    with pytest.raises(ds_unmanaged_gas.UnsupportedDeepSpeedError, match="pip install"):
        ds_unmanaged_gas.enable()
    assert_untouched(before)


def test_newer_release_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    monkeypatch.setattr(deepspeed, "__version__", "0.20.0")
    with pytest.warns(UserWarning, match=r"0\.20\.0 is newer"):
        ds_unmanaged_gas.enable(strict=True)  # as long as no source changed


def test_the_era_is_that_of_the_release() -> None:
    assert Version(engine.ERA.first) <= DEEPSPEED <= Version(engine.ERA.last)


def test_source_of_every_seam_is_known() -> None:
    """If this fails on a new release: read what changed, then `nox -s fingerprints`."""
    assert fingerprints.unknown(engine.methods(engine.patches())) == []


def test_changed_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = engine.DeepSpeedEngine.step

    def step(self: Any, lr_kwargs: Any = None) -> Any:
        return stock(self, lr_kwargs)

    monkeypatch.setattr(engine.DeepSpeedEngine, "step", step)
    before = namespaces()
    with pytest.raises(ds_unmanaged_gas.UnsupportedDeepSpeedError, match=r"DeepSpeedEngine\.step "):
        ds_unmanaged_gas.enable(strict=True)
    assert_untouched(before)
    with pytest.warns(UserWarning, match=r"the source of DeepSpeedEngine\.step is that of no"):
        ds_unmanaged_gas.enable()
    ds_unmanaged_gas.disable()  # before the stock step comes back


def test_wrapper_of_another_library_is_no_changed_source(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = engine.DeepSpeedEngine.step
    foreign = wrapt.FunctionWrapper(stock, lambda wrapped, i, args, kwargs: wrapped(*args))
    monkeypatch.setattr(engine.DeepSpeedEngine, "step", foreign)
    ds_unmanaged_gas.enable(strict=True)
    ds_unmanaged_gas.disable()


def test_hybrid_engine_goes_through_the_same_methods() -> None:
    from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine

    own = vars(DeepSpeedHybridEngine)
    assert issubclass(DeepSpeedHybridEngine, engine.DeepSpeedEngine)
    assert not {"backward", "is_gradient_accumulation_boundary", "_take_model_step"} & set(own)
    assert "super().step(" in inspect.getsource(own["step"])
    assert "super().__init__(" in inspect.getsource(own["__init__"])


def test_command_line_report() -> None:
    report = subprocess.run(
        [sys.executable, "-m", "ds_unmanaged_gas"], capture_output=True, text=True, check=True
    ).stdout
    assert f"ds_unmanaged_gas  {ds_unmanaged_gas.__version__}" in report
    for spec in engine.patches():
        assert spec.target in report
        assert spec.why in report


def test_installer_holds_the_only_ledger() -> None:
    ds_unmanaged_gas.enable()
    assert len(installer._ledger) == len(all_patches())
