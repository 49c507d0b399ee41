from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from ds_unmanaged_gas.config import Options, options_of, reject_unsupported, wants_unmanaged
from ds_unmanaged_gas.errors import UnmanagedGasError, UnsupportedConfigError


def ds_config(**attributes: Any) -> SimpleNamespace:
    zero = SimpleNamespace(**attributes.pop("zero", {}))
    return SimpleNamespace(zero_config=zero, _param_dict={}, **attributes)


def test_flag_absent_or_true_is_managed() -> None:
    assert not wants_unmanaged(SimpleNamespace(_param_dict={}))
    assert not wants_unmanaged(SimpleNamespace(_param_dict={"managed_gradient_accumulation": True}))
    assert wants_unmanaged(SimpleNamespace(_param_dict={"managed_gradient_accumulation": False}))


def test_options_block() -> None:
    def parse(block: Any) -> Options:
        return options_of(SimpleNamespace(_param_dict={"unmanaged_gradient_accumulation": block}))

    assert options_of(SimpleNamespace(_param_dict={})) == Options("gas", check_ranks=False)
    assert parse({}) == Options()
    assert parse({"gradient_scale": "num_items", "check_ranks": True}) == Options(
        "num_items", check_ranks=True
    )
    for bad in ({"reduction": 3}, {"gradient_scale": None}, {"check_ranks": "true"}, None, []):
        with pytest.raises(UnsupportedConfigError, match="unmanaged_gradient_accumulation"):
            parse(bad)


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "gradient_clipping", "zero"])
def test_other_keys_do_not_warn(key: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not wants_unmanaged(SimpleNamespace(_param_dict={key: 1}))


REFUSED = {
    "DeepCompile": ds_config(compile_config=SimpleNamespace(deepcompile=True)),
    "Apex AMP": ds_config(amp_enabled=True),
    "ZenFlow": ds_config(zero={"zenflow": object()}),
    "SuperOffload": ds_config(zero={"offload_optimizer": SimpleNamespace(super_offload=True)}),
    "MiCS": ds_config(zero={"mics_shard_size": 2}),
    "eigenvalue": ds_config(eigenvalue_enabled=True),
    "Muon": ds_config(optimizer_name="Muon"),
    "optimizer onebitadam": ds_config(optimizer_name="OneBitAdam"),
    "graph_harvesting": ds_config(graph_harvesting=True),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusal_names_what_and_the_way_out(what: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=rf"not supported with {what}.*: .*; .+"):
        reject_unsupported(REFUSED[what], is_pipeline=False)


def test_refusal_names_every_reason() -> None:
    config = ds_config(amp_enabled=True, eigenvalue_enabled=True)
    with pytest.raises(
        UnsupportedConfigError, match=r"pipeline.*nor with Apex AMP.*nor with eigen"
    ):
        reject_unsupported(config, is_pipeline=True)


def test_plain_config_is_accepted() -> None:
    disabled = SimpleNamespace(device=SimpleNamespace(value="none"), super_offload=False)
    reject_unsupported(
        ds_config(zero={"offload_optimizer": disabled, "offload_param": disabled}),
        is_pipeline=False,
    )


def test_errors_are_also_what_the_native_mode_raises() -> None:
    assert issubclass(UnsupportedConfigError, UnmanagedGasError)
    assert issubclass(UnsupportedConfigError, AssertionError)
    assert issubclass(UnsupportedConfigError, ValueError)


def test_import_loads_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys, ds_unmanaged_gas; ds_unmanaged_gas.status(); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'deepspeed')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_refusals_survive_python_o() -> None:
    code = (
        "import types\n"
        "from ds_unmanaged_gas.config import wants_unmanaged\n"
        "config = types.SimpleNamespace(_param_dict={'managed_gradient_accumulation': 'false'})\n"
        "try:\n    wants_unmanaged(config)\nexcept AssertionError:\n    raise SystemExit(7)\n"
    )
    assert subprocess.run([sys.executable, "-O", "-c", code], check=False).returncode == 7
