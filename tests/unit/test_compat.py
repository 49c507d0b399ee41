from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from ds_unmanaged_gas.compat import check_version, mirror_boundary
from ds_unmanaged_gas.errors import UnsupportedDeepSpeedError


@pytest.mark.parametrize("version", ["0.14.5", "0.18.3", "0.9", "0.18.4rc1"])
def test_too_old_names_the_range_and_the_remedy(version: str) -> None:
    with pytest.raises(UnsupportedDeepSpeedError, match=rf"{version}.*>=0\.18\.4.*pip install"):
        check_version(version)


@pytest.mark.parametrize("version", ["unknown", "", "master"])
def test_no_version_at_all(version: str) -> None:
    with pytest.raises(UnsupportedDeepSpeedError, match=r"no version.*pip install"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.18.4", "0.19.3", "0.19.8", "0.19.8+cu128"])
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
