"""Reads the ds_config keys of this package and refuses what unmanaged accumulation can't do.

Works on DeepSpeed's parsed ``DeepSpeedConfig`` by attribute, and imports no DeepSpeed.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import UnsupportedConfigError

FLAG = "managed_gradient_accumulation"
BLOCK = "unmanaged_gradient_accumulation"

_COMPRESSED_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")


CHOICES = {
    "gradient_scale": ("gas", "none", "num_backwards", "num_items"),
    "reduction": ("backward", "step"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """The ``unmanaged_gradient_accumulation`` block of a ds_config."""

    gradient_scale: str = "gas"
    """What the sum of a window's gradients is divided by. "gas": each loss by the configured GAS
    in backward(), as managed mode does, unless ``scale_wrt_gas=False``. "none": nothing.
    "num_backwards", "num_items": at step(), by what was counted in the window over all ranks."""

    reduction: str = "backward"
    """When ZeRO stages 2 and 3 average over ranks. "backward": in each one, and only this rank's
    partition of the sum is kept. "step": once per window, of full local sums. Stages 0 and 1 always
    do so."""

    check_ranks: bool = False
    """Compare on all ranks what is about to be called, before collectives can be mixed up."""


def wants_unmanaged(ds_config: Any) -> bool:
    """True if the user's ds_config asks for unmanaged accumulation.

    Raises UnsupportedConfigError for a flag that is no JSON boolean, and warns about a top-level
    key that is nearly the flag: DeepSpeed itself takes the string "false" for true, null for false,
    and ignores unknown keys.
    """
    params: Mapping[str, Any] = ds_config._param_dict
    for key in params:
        is_ours = key in (FLAG, BLOCK)
        if not is_ours and difflib.get_close_matches(str(key), [FLAG, BLOCK], cutoff=0.85):
            warnings.warn(
                f'ds_config key "{key}" is unknown and has no effect; did you mean "{FLAG}" or '
                f'"{BLOCK}"?',
                stacklevel=2,
            )
    flag = params.get(FLAG, True)
    if not isinstance(flag, bool):
        raise UnsupportedConfigError(
            f'ds_config["{FLAG}"] = {flag!r} is not a boolean; write true or false, '
            "without quotes, in JSON (True or False in Python)"
        )
    if flag and BLOCK in params:
        raise UnsupportedConfigError(
            f'ds_config["{BLOCK}"] = {params[BLOCK]!r} has no effect on a managed engine; set '
            f'"{FLAG}" to false as well, or remove the block'
        )
    return not flag


def options_of(ds_config: Any) -> Options:
    """The options in the user's ds_config. Raises UnsupportedConfigError for an unknown key or a
    value that is none of those allowed."""
    block = ds_config._param_dict.get(BLOCK, {})
    if not isinstance(block, dict):
        raise UnsupportedConfigError(f'ds_config["{BLOCK}"] = {block!r} is not a JSON object')
    known = [field.name for field in fields(Options)]
    for key, value in block.items():
        if key not in known:
            raise UnsupportedConfigError(
                f'ds_config["{BLOCK}"]["{key}"] = {value!r}: no such option; there are '
                f"{', '.join(known)}"
            )
    options = Options(**block)
    for name, choices in CHOICES.items():
        value = getattr(options, name)
        if value not in choices:
            raise UnsupportedConfigError(
                f'ds_config["{BLOCK}"]["{name}"] = {value!r} is none of {", ".join(choices)}'
            )
    if not isinstance(options.check_ranks, bool):
        raise UnsupportedConfigError(
            f'ds_config["{BLOCK}"]["check_ranks"] = {options.check_ranks!r} is not a boolean; '
            "write true or false"
        )
    return options


SUMS_IN_16_BITS = (
    "gradients of a bf16 model are added up in bf16, which loses small micro-batches in a long "
    'window; set ds_config["data_types"]["grad_accum_dtype"] = "fp32"'
)


def sums_in_16_bits(ds_config: Any) -> bool:
    """Whether a bf16 model's window is summed in bf16 though DeepSpeed could do better, as it can't
    at stage 0 from 0.18.5 on."""
    is_bf16 = getattr(ds_config, "bfloat16_config", None)
    enabled = is_bf16.enabled if is_bf16 is not None else ds_config.bfloat16_enabled
    return bool(enabled) and not _sums_in_fp32(ds_config) and ds_config.zero_optimization_stage > 0


def reduce_in_fp32(ds_config: Any) -> None:
    """Let sums in fp32 be reduced in fp32, unless the user chose a dtype: DeepSpeed's default is
    the model's dtype, in which a whole window would be rounded, and in fp16 overflow."""
    if ds_config.communication_data_type is None and _sums_in_fp32(ds_config):
        import torch

        ds_config.communication_data_type = torch.float32


def _sums_in_fp32(ds_config: Any) -> bool:
    return ds_config.grad_accum_dtype in ("fp32", "float32")


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
    if getattr(ds_config, "graph_harvesting", False):
        yield (
            "graph_harvesting: its graph goes on reading the memory of the first window's "
            'gradients, which step() gives back; set "graph_harvesting" to false'
        )
    against = against_optimizer(str(getattr(ds_config, "optimizer_name", None)))
    if against is not None:
        yield against


def against_optimizer(name: str) -> str | None:
    """The same for an optimizer of this name, in the ds_config or of a class."""
    name = name.lower()
    if name in _COMPRESSED_OPTIMIZERS:
        return (
            f"optimizer {name}: it communicates inside the optimizer, on gradients that were never "
            "averaged; use another optimizer"
        )
    if "muon" in name:
        return (
            "Muon: up to 0.19.7 ZeRO-3 orthogonalizes every micro-batch instead of their sum, and "
            "no stage was verified with it; use another optimizer"
        )
    return None


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
