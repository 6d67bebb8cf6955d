"""A pause before the process exits, which gives c10d's threads time to release tensors.

gloo's threads release a collective's tensors shortly after ``wait`` has returned to the program. They need the
GIL for tensors that Python references. If the interpreter is already shutting down, it kills such a thread
within a C++ destructor. The process then aborts ("terminate called without an active exception", exit code -6),
although all of its work is done. ``destroy_process_group`` waits for the threads only if nothing references the
group, but an engine references it.
"""

from __future__ import annotations

import atexit
import time
from typing import Final

# Many times the time that a runnable thread needs, and negligible compared to the start of a program.
_PAUSE_S: Final = 0.02


def pause_before_ending() -> None:
    """Let the process pause before the interpreter exits. A second call changes nothing."""
    atexit.unregister(_pause)
    atexit.register(_pause)


def _pause() -> None:
    time.sleep(_PAUSE_S)
