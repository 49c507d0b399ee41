"""Own the optimizer-step boundary on stock DeepSpeed.

    import ds_unmanaged_gas
    ds_unmanaged_gas.enable()

From then on an engine whose ds_config has ``"managed_gradient_accumulation": false`` accumulates on
every ``backward()`` and applies exactly one optimizer update on every ``step()``. Importing this
package imports neither torch nor DeepSpeed and changes nothing; ``enable()`` does.
"""

from .accumulation import AccumulationWindow, accumulation
from .errors import (
    BoundaryError,
    EngineRetiredError,
    PatchConflictError,
    RanksDifferError,
    UnmanagedGasError,
    UnsupportedConfigError,
    UnsupportedDeepSpeedError,
    UnsupportedLibraryError,
    WindowArgumentError,
    WindowFailedError,
    WindowOpenError,
)
from .installer import Patch, Status, disable, enable, is_unmanaged, status
from .window import WindowState

__version__ = "0.1.0"

__all__ = [
    "AccumulationWindow",
    "BoundaryError",
    "EngineRetiredError",
    "Patch",
    "PatchConflictError",
    "RanksDifferError",
    "Status",
    "UnmanagedGasError",
    "UnsupportedConfigError",
    "UnsupportedDeepSpeedError",
    "UnsupportedLibraryError",
    "WindowArgumentError",
    "WindowFailedError",
    "WindowOpenError",
    "WindowState",
    "__version__",
    "accumulation",
    "disable",
    "enable",
    "is_unmanaged",
    "status",
]
