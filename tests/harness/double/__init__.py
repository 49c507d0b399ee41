"""A GPU for DeepSpeed without a GPU: CPU torch with two memories and streams that are late.

[Note: how the double works]
Device memory is CPU memory that is told apart by its storage. Work on it is not done when it is
called: it waits in the queue of the current stream until the host waits for that stream, or another
stream that waits for it is made to run. So whoever does not wait sees old memory, as on the worst
of days on a GPU: a host that reads a pinned buffer before the copy into it has arrived, a stream
that reads what another one has not written yet. Freed device memory is given out again to the
stream that allocated it, at once, unless record_stream() said that another one uses it too.

Beside that, every access is compared with the earlier ones to the same bytes by vector clocks, one
per stream and one for the host: two of them, of which one writes, that no wait orders are a race,
whatever came of it. Waits of the host, copies, bytes and kernels are counted.

Not like a GPU: a collective takes place when it is called, as work on the current stream; kernels
take no time and have a CPU's numerics; autograd stays in the calling thread.
"""

from __future__ import annotations

from .accelerator import FusedAdam, FusedSGD, install
from .memory import is_on_device, pin_memory
from .modes import active
from .streams import DEFAULT, RECORD, Event, Stream, finish, on_stream, synchronize

__all__ = [
    "DEFAULT",
    "RECORD",
    "Event",
    "FusedAdam",
    "FusedSGD",
    "Stream",
    "active",
    "finish",
    "install",
    "is_on_device",
    "on_stream",
    "pin_memory",
    "synchronize",
]
