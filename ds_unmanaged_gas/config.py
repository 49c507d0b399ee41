"""Reads the ds_config keys of this package and refuses what unmanaged accumulation can't do.

Works on DeepSpeed's parsed ``DeepSpeedConfig`` by attribute, and imports no DeepSpeed.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import UnsupportedConfigError

FLAG = "managed_gradient_accumulation"
_BLOCK = "unmanaged_gradient_accumulation"

AGAINST_MUON = (
    "Muon: up to 0.19.7 ZeRO-3 orthogonalizes every micro-batch instead of their sum, and no stage "
    "was verified with it; use another optimizer"
)

_COMPRESSED_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")


def wants_unmanaged(ds_config: Any) -> bool:
    """True if the user's ds_config asks for unmanaged accumulation.

    Raises UnsupportedConfigError for a flag that is no JSON boolean, and warns about a top-level
    key that is nearly the flag: DeepSpeed itself takes the string "false" for true, null for false,
    and ignores unknown keys.
    """
    params: Mapping[str, Any] = ds_config._param_dict
    if _BLOCK in params:
        raise UnsupportedConfigError(
            f'ds_config["{_BLOCK}"] = {params[_BLOCK]!r}: this version has no options to set '
            "there; remove the block"
        )
    for key in params:
        if key != FLAG and difflib.get_close_matches(str(key), [FLAG, _BLOCK], cutoff=0.85):
            warnings.warn(
                f'ds_config key "{key}" is unknown and has no effect; did you mean "{FLAG}"?',
                stacklevel=2,
            )
    flag = params.get(FLAG, True)
    if not isinstance(flag, bool):
        raise UnsupportedConfigError(
            f'ds_config["{FLAG}"] = {flag!r} is not a boolean; write true or false, '
            "without quotes, in JSON (True or False in Python)"
        )
    return not flag


def reject_unsupported(ds_config: Any, *, is_pipeline: bool) -> None:
    """Raise UnsupportedConfigError, naming every reason, if the configuration can't be honoured."""
    reasons = [*_against_engine(ds_config, is_pipeline), *_against_zero(ds_config.zero_config)]
    if reasons:
        raise UnsupportedConfigError(
            f'"{FLAG}": false is not supported with ' + "; nor with ".join(reasons)
        )


def _against_engine(ds_config: Any, is_pipeline: bool) -> Iterator[str]:
    """What stands against unmanaged accumulation, each with the reason and the way out."""
    if is_pipeline:
        # The first words are those of the native mode, which some callers match on.
        yield (
            "pipeline parallelism: its schedule, not the caller, decides how many backwards a step "
            "has; use a model that is no PipelineModule, or remove the flag"
        )
    if getattr(getattr(ds_config, "compile_config", None), "deepcompile", False):
        yield (
            'DeepCompile: it compiles the reduction into the graph; set "compile": '
            '{"deepcompile": false}'
        )
    if getattr(ds_config, "amp_enabled", False):
        yield 'Apex AMP: it unscales inside backward(); use "bf16", "fp16" or "torch_autocast"'
    if getattr(ds_config, "eigenvalue_enabled", False):
        yield 'eigenvalue: it differentiates through backward(); set "eigenvalue.enabled" to false'
    optimizer_name = str(getattr(ds_config, "optimizer_name", None)).lower()
    if optimizer_name in _COMPRESSED_OPTIMIZERS:
        yield (
            f"optimizer {optimizer_name}: it communicates inside the optimizer, on gradients that "
            "were never averaged; use another optimizer"
        )
    if "muon" in optimizer_name:
        yield AGAINST_MUON


def _against_zero(zero: Any) -> Iterator[str]:
    """The same for the zero_optimization block."""
    if getattr(zero, "zenflow", None) is not None:
        yield (
            "ZenFlow: it updates on a cadence of its own, between the caller's steps; remove "
            '"zero_optimization.zenflow"'
        )
    if getattr(getattr(zero, "offload_optimizer", None), "super_offload", False):
        yield (
            "SuperOffload: it runs the optimizer from inside backward(); remove "
            '"zero_optimization.offload_optimizer.super_offload"'
        )
    if getattr(zero, "mics_shard_size", -1) > 0:
        yield (
            "MiCS: the all-reduce between its replicas runs only at boundaries it counts itself; "
            'remove "zero_optimization.mics_shard_size"'
        )
