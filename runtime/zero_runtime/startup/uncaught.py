"""One-line reports of uncaught errors of this package, with exit code 2.

The report contains the message and the line of the script. A traceback through this package and torch, once for
each rank, would hide both. Ranks usually fail in the same way, so only the first failing rank of a host prints
the report. A script that catches the error is not affected, and other errors keep their traceback.
``ZERO_RUNTIME_LOG_LEVEL=debug`` shows the traceback of these errors, too.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import logging
import os
import socket
import sys
import sysconfig
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

from commprof import hooks
from zero_runtime import log
from zero_runtime.errors import TrafficContractError, ZeroRuntimeError

EXIT_CODE: Final = 2
PAUSE_S: Final = 2.0  # time in which other ranks with the same error stay silent
# Folders without scripts of the user: this package, commprof (which wraps the calls of a recorded program), torch,
# Python's own modules and installed packages.
_INNER: Final = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(__file__).parents[1],
        Path(hooks.__file__).parent,
        Path(torch.__file__).parent,
        *map(sysconfig.get_path, ("stdlib", "purelib")),
    )
)


def report_uncaught() -> None:
    """Report uncaught errors of this package by one line from now on. A second call changes nothing."""
    previous = sys.excepthook
    if getattr(previous, "__module__", None) == __name__:
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ZeroRuntimeError):
            previous(kind, error, trace)
            return
        # torch.distributed's hook buffers sys.stderr, and drops the buffer when the hook below it raises.
        if log.level() <= logging.DEBUG:
            traceback.print_exception(kind, error, trace, file=sys.__stderr__)
        _say_once(sentence_of(error, trace))
        if isinstance(error, TrafficContractError):
            # Other ranks may wait in a collective, and the destruction of the process group would wait for them.
            atexit._run_exitfuncs()
            os._exit(EXIT_CODE)
        # Python uses the exit code of a SystemExit that the hook raises.
        raise SystemExit(EXIT_CODE)

    sys.excepthook = report


def sentence_of(error: BaseException, trace: TracebackType | None) -> str:
    """Return the printed text of ``error``: its message, and the line of the script."""
    sentence = f"zero_runtime: error: {error}"
    places = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith((*_INNER, "<"))]
    if not places:
        return sentence
    place = places[-1]
    code = f": {place.line}" if place.line else ""
    return f"{sentence}\n  {place.filename}, line {place.lineno}{code}"


def _say_once(sentence: str) -> None:
    """Print the sentence, unless another rank of this host has printed it.

    The ranks of a job have one parent process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        print(sentence, file=sys.__stderr__, flush=True)
        return
    name = hashlib.sha256(f"{os.getppid()} {sentence}".encode()).hexdigest()
    # The claim is an abstract socket name. Only one process can have the name, it needs no folder, and it disappears
    # with its process.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
        try:
            claim.bind(f"\0zero_runtime/{name}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return
        print(sentence, file=sys.__stderr__, flush=True)
        time.sleep(PAUSE_S)
