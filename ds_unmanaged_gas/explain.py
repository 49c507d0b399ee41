"""What a ds_config asks for, told without starting a job: ``python -m ds_unmanaged_gas check``."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from . import config
from .errors import UnsupportedConfigError


def explain(params: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Whether the installed DeepSpeed and the plugin accept this ds_config, and what will happen at
    backward() and step(), or why not, in lines of text.

    Imports DeepSpeed. What depends on the model, the optimizer object or the number of ranks is not
    seen.
    """
    lines: list[str] = []
    known, automatic = _without_automatic(params)
    if automatic:
        lines.append(f'left out, since "auto" is no value yet: {", ".join(automatic)}')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            parsed = _parse(known)
            is_unmanaged = config.wants_unmanaged(parsed)
            if is_unmanaged:
                options = config.options_of(parsed)
                config.reject_unsupported(parsed, is_pipeline=False)
        except UnsupportedConfigError as error:
            return False, [*lines, f"refused: {error}"]
        except Exception as error:  # noqa: BLE001, whatever DeepSpeed has against it
            return False, [*lines, f"refused by DeepSpeed: {type(error).__name__}: {error}"]
    ours = [str(w.message) for w in caught if config.FLAG in str(w.message)]
    lines += [f"warning: {text}" for text in ours]
    if not is_unmanaged:
        text = f'managed: "{config.FLAG}" is not false, so stock code decides when a window ends'
        return True, [*lines, text]
    return True, [*lines, *_behaviour(parsed, options)]


def _without_automatic(params: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A copy without the values "auto", which an integration fills in later, and their names."""
    names: list[str] = []

    def strip(block: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in block.items():
            if value == "auto":
                names.append(prefix + key)
            elif isinstance(value, dict):
                kept[key] = strip(value, f"{prefix}{key}.")
            else:
                kept[key] = copy.deepcopy(value)
        return kept

    return strip(params, ""), names


def _parse(params: dict[str, Any]) -> Any:
    """DeepSpeed's own reading of the ds_config, for one rank."""
    from deepspeed.runtime.config import DeepSpeedConfig

    # Their product with the number of ranks is checked, which is not known here.
    for_one_rank = {k: v for k, v in params.items() if k != "train_batch_size"}
    for_one_rank.setdefault("train_micro_batch_size_per_gpu", 1)
    with contextlib.redirect_stdout(io.StringIO()):
        return DeepSpeedConfig(for_one_rank)


def _behaviour(parsed: Any, options: config.Options) -> Iterator[str]:
    stage = int(parsed.zero_optimization_stage)
    yield f"unmanaged: accepted, ZeRO stage {stage}"
    at_step = stage < 2 or options.reduction == "step"
    yield f"backward(): {_at_backward(parsed, options, at_step)}"
    yield f"step(): {_at_step(options, at_step)}"
    yield f"clipping: {_clip(parsed)}"
    if options.check_ranks:
        yield "check_ranks: one small all-reduce before each call that communicates"
    if config.sums_in_16_bits(parsed):
        yield f"warning: {config.SUMS_IN_16_BITS}"


def _at_backward(parsed: Any, options: config.Options, at_step: bool) -> str:
    divided = {
        "gas": f"divides the loss by GAS = {parsed.gradient_accumulation_steps} "
        "(unless scale_wrt_gas=False)",
        "num_items": "counts num_items, which accumulation(engine).backward() takes",
    }.get(options.gradient_scale, "takes the loss as it is")
    if at_step:
        return f"{divided}; gradients add up on this rank, nothing is communicated"
    where = "on the host" if getattr(parsed.zero_config, "offload_optimizer", None) else "on device"
    return f"{divided}; gradients are reduced, and this rank's part is added up {where}"


def _at_step(options: config.Options, at_step: bool) -> str:
    reduced = "reduces once, then " if at_step else ""
    counted = options.gradient_scale in ("num_backwards", "num_items")
    divided = f"divides by {options.gradient_scale} of all ranks, then " if counted else ""
    return f"{reduced}{divided}applies exactly one update, whatever the number of backwards"


def _clip(parsed: Any) -> str:
    norm = float(parsed.gradient_clipping)
    return f"gradient_clipping = {norm}" if norm > 0 else "off"
