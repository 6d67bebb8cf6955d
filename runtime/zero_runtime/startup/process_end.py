"""A pause before the process exits, which gives c10d's threads time to release tensors.

gloo's threads release a collective's tensors shortly after ``wait`` has returned to the program, and need the GIL for
tensors that Python references. If the interpreter is already shutting down, it kills such a thread within a C++ destructor,
and the process aborts ("terminate called without an active exception", exit code -6) after all of its work is done.
``destroy_process_group`` waits for the threads only if nothing references the group; an engine does.
"""

from __future__ import annotations

import atexit
import time
from typing import Final

_PAUSE_S: Final = 0.02  # many times what a runnable thread needs, and negligible beside a program's start


def pause_before_ending() -> None:
    """Let the process pause before the interpreter exits. A second call changes nothing."""
    atexit.unregister(_pause)
    atexit.register(_pause)


def _pause() -> None:
    time.sleep(_PAUSE_S)
