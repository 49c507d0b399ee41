"""Which DeepSpeed releases are supported, and the few spellings that differ among them.

The only module that compares versions. What a release can do is asked of the release itself, by
attribute, wherever an attribute tells.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from .errors import UnsupportedDeepSpeedError

_OLDEST = Version("0.18.4")
_NEWEST_TESTED = Version("0.19.8")
SUPPORTED = f">={_OLDEST}, tested up to {_NEWEST_TESTED}"


@dataclass(frozen=True, slots=True)
class Release:
    """The DeepSpeed that is installed."""

    version: str
    era: str


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


def describe(version: str, engine_class: type) -> Release:
    """Name the era of an installed release: does its engine know the flag itself?"""
    if hasattr(engine_class, FLAG_METHOD):
        era = "native: this release has the mode; the plugin takes over from it"
    else:
        era = "before native: this release ignores the flag without the plugin"
    return Release(version, era)


FLAG_METHOD = "managed_gradient_accumulation"


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
