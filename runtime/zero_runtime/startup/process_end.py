"""What c10d is given time for when the process ends.

gloo's threads let go of a collective's tensors a moment after ``wait`` has returned to the program, and need Python's lock
for those that Python knows. Where the interpreter has begun to end by then, it ends such a thread in the middle of a C++
destructor, and the process aborts ("terminate called without an active exception", exit code -6) after all of its work
was done. ``destroy_process_group`` waits for the threads only where nothing refers to the group any more; an engine does.
"""

from __future__ import annotations

import atexit
import time
from typing import Final

_PAUSE_S: Final = 0.02  # many times what a thread that can run needs, and nothing beside a program's start


def pause_before_ending() -> None:
    """From now on let the process pause before the interpreter ends. A second call changes nothing."""
    atexit.unregister(_pause)
    atexit.register(_pause)


def _pause() -> None:
    time.sleep(_PAUSE_S)
