"""Whether the stock methods that the plugin wraps are ones it was tested with.

A method can keep its name and change what it does. So the source of every wrapped method, and of
the stock methods whose effect the wrappers count on, is known for every release of the range:
``fingerprints.json`` has a hash of each, and the releases that have it. ``nox -s fingerprints``
records it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from types import ModuleType
from typing import Any

from .compat import undecorated
from .patching import full_name

Method = tuple[type | ModuleType, str]


@functools.cache
def of(function: Any) -> str:
    """A hash of a function's source that comments, blank lines and indentation don't change."""
    lines = [line.strip() for line in inspect.getsource(undecorated(function)).splitlines()]
    code = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def known() -> Mapping[str, Mapping[str, list[str]]]:
    """Method -> hash of its source -> the releases that have it."""
    text = resources.files(__package__).joinpath("fingerprints.json").read_text("utf-8")
    found: Mapping[str, Mapping[str, list[str]]] = json.loads(text)
    return found


def unknown(methods: Iterable[Method]) -> list[str]:
    """Those of the methods whose source is that of no known release."""
    recorded = known()
    changed = []
    for owner, name in dict.fromkeys(methods):
        if name not in vars(owner):
            continue  # a missing seam, which is an error of its own
        try:
            fingerprint = of(vars(owner)[name])
        except OSError:  # installed without its source
            fingerprint = ""
        if fingerprint not in recorded.get(full_name(owner, name), {}):
            changed.append(f"{owner.__name__}.{name}")
    return changed
