"""Every error that this package raises, each with the way out in its message."""


class UnmanagedGasError(RuntimeError):
    """Base of every error raised by this package."""


class UnsupportedDeepSpeedError(UnmanagedGasError):
    """The installed DeepSpeed is outside the supported range, or lacks a seam we have to patch."""


class UnsupportedLibraryError(UnmanagedGasError):
    """A library that drives engines itself lacks a seam we have to patch."""


class PatchConflictError(UnmanagedGasError):
    """Another library wrapped one of the patched methods after us, so our patch can't come off."""


class WindowOpenError(UnmanagedGasError):
    """A call would lose gradients that no step() has applied."""


class WindowFailedError(UnmanagedGasError):
    """An exception left the window half done; its gradients can't be completed or told apart."""


class WindowArgumentError(UnmanagedGasError, ValueError):
    """An argument of backward() or step() makes no sense. Nothing was accumulated or applied."""


class RanksDifferError(UnmanagedGasError):
    """Ranks are about to issue different collectives (found with ``"check_ranks": true``)."""


class EngineRetiredError(UnmanagedGasError):
    """An engine built for unmanaged accumulation was used after ``disable()``."""


# DeepSpeed's native mode reports these two by ``assert``. Deriving from AssertionError keeps code
# that catches it working, while the check itself survives ``python -O``.
class UnsupportedConfigError(UnmanagedGasError, AssertionError, ValueError):
    """The ds_config asks for something that unmanaged accumulation can't do, or is malformed."""


class BoundaryError(UnmanagedGasError, AssertionError):
    """A call would take the accumulation boundary out of the caller's hands."""
