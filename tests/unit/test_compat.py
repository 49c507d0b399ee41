from __future__ import annotations

import ast
import itertools
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wrapt

from ds_unmanaged_gas.compat import ERAS, check_version, era_of, mirror_boundary, undecorated
from ds_unmanaged_gas.errors import UnsupportedDeepSpeedError

NOXFILE = Path(__file__).parents[2] / "noxfile.py"


@pytest.mark.parametrize("version", ["0.14.5", "0.9", "0.15.0rc1"])
def test_too_old_names_the_range_and_the_remedy(version: str) -> None:
    with pytest.raises(UnsupportedDeepSpeedError, match=rf"{version}.*>=0\.15\.0.*pip install"):
        check_version(version)


@pytest.mark.parametrize("version", ["unknown", "", "master"])
def test_no_version_at_all(version: str) -> None:
    with pytest.raises(UnsupportedDeepSpeedError, match=r"no version.*pip install"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.15.0", "0.18.4", "0.19.8", "0.19.8+cu128"])
def test_supported_versions_are_silent(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version(version)


@pytest.mark.parametrize("version", ["0.19.9", "0.20.0", "1.0"])
def test_newer_than_tested_warns(version: str) -> None:
    with pytest.warns(UserWarning, match=rf"{version} is newer than 0\.19\.8"):
        check_version(version)


def test_mirror_boundary_uses_the_setter_where_the_name_is_a_method() -> None:
    class New:
        value = True

        def is_gradient_accumulation_boundary(self) -> bool:
            return self.value

        def set_gradient_accumulation_boundary(self, value: bool) -> None:
            self.value = value

    new, old, bare = (
        New(),
        SimpleNamespace(is_gradient_accumulation_boundary=True),
        SimpleNamespace(),
    )
    for optimizer in (new, old, bare):
        mirror_boundary(optimizer, False)
    assert new.is_gradient_accumulation_boundary() is False
    assert old.is_gradient_accumulation_boundary is False
    assert vars(bare) == {}


def test_eras_are_told_apart_by_the_newest_mark() -> None:
    engine = SimpleNamespace(no_sync=1, _backward_epilogue=1)
    module = SimpleNamespace(DeepSpeedEngine=engine)
    assert era_of(module) is ERAS[2]
    module.configure_zenflow = 1
    assert era_of(module) is ERAS[3]
    assert era_of(SimpleNamespace(DeepSpeedEngine=SimpleNamespace())) is ERAS[0]


def test_matrix_has_one_release_of_every_era_and_the_sweep_every_release() -> None:
    constants: dict[str, Any] = {}
    for node in ast.parse(NOXFILE.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
            "NEWEST",
            "OLDER",
            "_MINORS",
            "EVERY",
        ):
            exec(ast.unparse(node), constants)  # noqa: S102
    matrix = [constants["NEWEST"], *constants["OLDER"]]
    assert matrix == [era.last for era in reversed(ERAS)]
    every = constants["EVERY"]
    assert len(every) == 41
    for before, after in itertools.pairwise(ERAS):
        assert every.index(after.first) == every.index(before.last) + 1
    assert (every[0], every[-1]) == (ERAS[0].first, ERAS[-1].last)


def test_undecorated_looks_below_wrappers_and_the_closure_of_an_old_decorator() -> None:
    def instrument_w_nvtx(func: Any) -> Any:
        def wrapped_fn() -> Any:
            return func()

        wrapped_fn.__qualname__ = "instrument_w_nvtx.<locals>.wrapped_fn"
        return wrapped_fn

    def step() -> None: ...

    decorated = wrapt.FunctionWrapper(instrument_w_nvtx(step), lambda *_: None)
    assert undecorated(decorated) is step
    assert undecorated(step) is step
