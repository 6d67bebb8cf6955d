"""An error of this package that ends the program is one sentence and exit code 2.

What is wrong stands in the sentence, and in which line of the script; Python's traceback through this package and torch
would hide both, once for each rank. Ranks mostly fail alike, so the first one of a host to fail says it. A script that
catches the error sees nothing of this, other errors keep their traceback, and ``ZERO_RUNTIME_LOG_LEVEL=debug`` shows it for
these too.
"""

from __future__ import annotations

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

from zero_runtime import log
from zero_runtime.errors import ZeroRuntimeError

EXIT_CODE: Final = 2
PAUSE_S: Final = 2.0  # how much later another rank may fail and still find that all is said
# Where no script of the user's is: this package, torch, Python's own modules and what is installed beside them.
_INNER: Final = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(__file__).parent,
        Path(torch.__file__).parent,
        *map(sysconfig.get_path, ("stdlib", "purelib")),
    )
)


def report_uncaught() -> None:
    """From now on let an uncaught error of this package end the program with its sentence. A second call changes nothing."""
    previous = sys.excepthook
    if getattr(previous, "__module__", None) == __name__:
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ZeroRuntimeError):
            previous(kind, error, trace)
            return
        # torch.distributed's hook lays a buffer over sys.stderr, and drops it when the hook below it raises.
        if log.level() <= logging.DEBUG:
            traceback.print_exception(kind, error, trace, file=sys.__stderr__)
        _say_once(sentence_of(error, trace))
        # Python takes the exit code of a SystemExit that leaves the hook.
        raise SystemExit(EXIT_CODE)

    sys.excepthook = report


def sentence_of(error: BaseException, trace: TracebackType | None) -> str:
    """What is printed of ``error``: its message, and where the script met it."""
    sentence = f"zero_runtime: error: {error}"
    places = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith((*_INNER, "<"))]
    if not places:
        return sentence
    place = places[-1]
    code = f": {place.line}" if place.line else ""
    return f"{sentence}\n  {place.filename}, line {place.lineno}{code}"


def _say_once(sentence: str) -> None:
    """Print what no other rank of this host has printed; the ranks of a job have one parent."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        print(sentence, file=sys.__stderr__, flush=True)
        return
    name = hashlib.sha256(f"{os.getppid()} {sentence}".encode()).hexdigest()
    # A name that one process can have at a time, that needs no folder, and that ends with its process.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
        try:
            claim.bind(f"\0zero_runtime/{name}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return
        print(sentence, file=sys.__stderr__, flush=True)
        time.sleep(PAUSE_S)
