"""Which DeepSpeed releases are supported, and the few spellings that differ among them.

The only module that compares versions. What a release can do is asked of the release itself, by
attribute, wherever an attribute tells.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from .errors import UnsupportedDeepSpeedError

FLAG_METHOD = "managed_gradient_accumulation"


@dataclass(frozen=True, slots=True)
class Era:
    """Consecutive releases whose backward() and step() work alike."""

    first: str
    last: str
    mark: str
    """A name in ``deepspeed.runtime.engine`` that these and later releases have."""
    trait: str
    """What the first of them changed."""

    def __str__(self) -> str:
        return f"{self.first} to {self.last}: {self.trait}"

    def has_begun(self, engine_module: Any) -> bool:
        try:
            operator.attrgetter(self.mark)(engine_module)
        except AttributeError:
            return False
        return True


# Oldest first. What is wrapped in each, and why, is said beside the wrappers. The README's table of
# it is made from there.
ERAS = (
    Era(
        "0.15.0",
        "0.15.4",
        "DeepSpeedEngine",
        "backward() is one piece, and only it ends a backward",
    ),
    Era(
        "0.16.0",
        "0.16.4",
        "DeepSpeedEngine.no_sync",
        "no_sync()",
    ),
    Era(
        "0.16.5",
        "0.17.4",
        "DeepSpeedEngine._backward_epilogue",
        "backward() has a prologue and an epilogue",
    ),
    Era(
        "0.17.5",
        "0.18.2",
        "configure_zenflow",
        "ZenFlow decides boundaries; from 0.17.6 stage 2 keeps gradient lists",
    ),
    Era(
        "0.18.3",
        "0.18.4",
        "ZeROOptimizer.scale_if_loss",
        "hooks on the outputs of forward(), so that loss.backward() works",
    ),
    Era(
        "0.18.5",
        "0.19.3",
        "ZeROOptimizer.queue_post_backward_callback",
        "autograd tells the end of a backward",
    ),
    Era(
        "0.19.4",
        "0.19.4",
        f"DeepSpeedEngine.{FLAG_METHOD}",
        "DeepSpeed's own unmanaged mode, without offload",
    ),
    Era(
        "0.19.5",
        "0.19.5",
        "ZeROOptimizer.set_gradient_accumulation_boundary",
        "the same with offload; optimizers have a method to set the boundary",
    ),
    Era(
        "0.19.6",
        "0.19.7",
        "_ENGINE_BACKWARD_GRAPH_TRACKER",
        "backward() divides the loss by GAS, not its gradient",
    ),
    Era(
        "0.19.8",
        "0.19.8",
        "DeepSpeedZeroOptimizer._use_compact_grad_partition_buffer",
        "Apex AMP and eigenvalue are gone; flat fp32 sums for 16-bit models",
    ),
)

_OLDEST = Version(ERAS[0].first)
_NEWEST_TESTED = Version(ERAS[-1].last)
SUPPORTED = f">={_OLDEST}, tested up to {_NEWEST_TESTED}"


def era_of(engine_module: Any) -> Era:
    """The era of the installed release, by what ``deepspeed.runtime.engine`` has."""
    return next(era for era in reversed(ERAS) if era.has_begun(engine_module))


def check_version(version: str) -> None:
    """Raise UnsupportedDeepSpeedError below the supported range, warn above what was tested."""
    remedy = f'install one with: pip install "deepspeed>={_OLDEST},<={_NEWEST_TESTED}"'
    try:
        # A local build suffix (0.19.8+cu128) says nothing about the source.
        parsed = Version(Version(version).public)
    except InvalidVersion:
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed {version!r} has no version that can be compared; ds_unmanaged_gas supports "
            f"deepspeed {SUPPORTED}; {remedy}"
        ) from None
    if parsed < _OLDEST:
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed {version} is too old; ds_unmanaged_gas supports deepspeed {SUPPORTED}; "
            f"{remedy}"
        )
    if parsed > _NEWEST_TESTED:
        warnings.warn(
            f"DeepSpeed {version} is newer than {_NEWEST_TESTED}, the newest release that "
            "ds_unmanaged_gas was tested with. Every method it depends on is checked to exist, "
            "but what they do may have changed",
            stacklevel=3,
        )


def can_choose_reduction_dtype(version: str, stage: int) -> bool:
    """Whether gradients can be reduced in another dtype than the model's. ZeRO-1/2 of 0.17.2 to
    0.18.1 fail then on every parameter that is larger than a bucket."""
    return stage > 2 or not Version("0.17.2") <= Version(version) <= Version("0.18.1")


def reduces_every_tile(version: str) -> bool:
    """Whether ZeRO-1/2 put the gradient of every tile of a sequence-tiled module into the bucket,
    and not the last one's only, which is the sum."""
    return Version("0.17.0") <= Version(version) <= Version("0.18.5")


def mirror_boundary(optimizer: Any, is_boundary: bool) -> None:
    """Tell a ZeRO optimizer whether this is a boundary.

    A plain attribute up to 0.19.4. From 0.19.5 a method of that name exists, which assigning the
    attribute would shadow, and a setter to use instead.
    """
    setter = getattr(optimizer, "set_gradient_accumulation_boundary", None)
    if setter is not None:
        setter(is_boundary)
    elif hasattr(optimizer, "is_gradient_accumulation_boundary"):
        optimizer.is_gradient_accumulation_boundary = is_boundary


def undecorated(function: Any) -> Any:
    """The function that DeepSpeed wrote: below wrapt's wrappers, and below its own profiling
    decorator, which hides it in a closure up to 0.18.x."""
    function = inspect.unwrap(function)
    while getattr(function, "__qualname__", "").startswith("instrument_w_nvtx.<locals>"):
        (function,) = (
            cell.cell_contents
            for cell in function.__closure__
            if inspect.isfunction(cell.cell_contents)
        )
        function = inspect.unwrap(function)
    return function
