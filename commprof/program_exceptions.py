"""Exceptions of the program that come while the recorder's code runs. Standard library only."""

from __future__ import annotations

import inspect
import os
import traceback
from pathlib import Path
from types import FrameType
from typing import Final

_OURS: Final = str(Path(__file__).parent) + os.sep


def pass_on(error: BaseException) -> None:
    """Raise ``error`` again if it is the program's.

    Python runs signal handlers between any two instructions, so one that raises (SIGALRM with a TimeoutError) may do it in
    the recorder's code, and a trace function may as well. Without the recorder, the program would get that exception.
    """
    if is_interruption(error):
        raise error


def is_interruption(error: BaseException) -> bool:
    """Whether ``error`` is of a signal handler or a trace function: it says nothing about the call that it interrupts."""
    return isinstance(error, KeyboardInterrupt) or any(
        _interrupts(frame) for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _interrupts(frame: FrameType) -> bool:
    """Whether Python called the program's function of ``frame`` between two instructions, with the frame that it interrupts.

    A signal handler gets the number of the signal before it, a trace function the name of the event after it.
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
