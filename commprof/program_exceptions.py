"""Detects exceptions of the program that are raised while the recorder's code runs. Standard library only."""

from __future__ import annotations

import inspect
import os
import traceback
from pathlib import Path
from types import FrameType
from typing import Final

_OURS: Final = str(Path(__file__).parent) + os.sep


def pass_on(error: BaseException) -> None:
    """Raise ``error`` again if it is an exception of the program.

    Python runs signal handlers between any two instructions. A handler that raises (SIGALRM with a TimeoutError) may
    therefore interrupt the recorder's code. A trace function may do this as well. The recorder must not swallow the
    exception, because the program would receive it if the recorder were not there.
    """
    if is_interruption(error):
        raise error


def is_interruption(error: BaseException) -> bool:
    """Return whether a signal handler or a trace function raised ``error``.

    Such an error is unrelated to the call that it interrupts.
    """
    return isinstance(error, KeyboardInterrupt) or any(
        _interrupts(frame) for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _interrupts(frame: FrameType) -> bool:
    """Return whether ``frame`` runs a function of the program that Python called between two instructions.

    Python passes the interrupted frame to such a function. For a signal handler, the argument before the frame is the
    number of the signal. For a trace function, the argument after the frame is the name of the event.
    """
    if frame.f_back is None or frame.f_code.co_filename.startswith(_OURS):
        return False
    names, more, _, values = inspect.getargvalues(frame)
    arguments = [values.get(name) for name in names]
    arguments += values.get(more, ()) if more else ()
    for place, argument in enumerate(arguments):
        if argument is frame.f_back:
            before, after = arguments[:place][-1:], arguments[place + 1 :][:1]
            return any(isinstance(each, int) for each in before) or any(
                isinstance(each, str) for each in after
            )
    return False
