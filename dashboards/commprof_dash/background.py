"""Computes slow answers in another process, so that no page waits several seconds for an answer.

The process has a low priority, computes one answer and exits, which frees its memory. The process is a new
interpreter that imports this module. It does not import the program of the dashboard, because this program may be
a script that starts the dashboard unconditionally.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Final

_MOST_WAITING: Final = 64  # the largest number of answers that no page has read yet
_NICENESS: Final = 10
_CODE: Final = (
    "import sys; from multiprocessing.connection import Connection; connection = Connection(int(sys.argv[1])); "
    "sys.path[:] = connection.recv(); from commprof_dash import background; background.answer_question(connection)"
)


class Background:
    """The answers that another process computes or has computed, until a page reads each answer.

    Attributes:
        process: The process that is computing an answer; None if there is none.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "commprof answers")
        self._asked: dict[Hashable, Future[Any]] = {}

    def ask(self, key: Hashable, answer: Callable[[Any], Any], argument: Any) -> Any | None:
        """Return ``answer(argument)``, or None while it is being computed. The first call starts the computation.

        Args:
            key: The key that identifies the question. The answer to a question is returned once.
            answer: A module-level function that does not return None.

        Raises:
            Exception: ``answer`` raised this exception; the next call starts the computation again.
        """
        with self._lock:
            future = self._asked.get(key)
            if future is None:
                future = self._asked[key] = self._pool.submit(self._answer, answer, argument)
                self._forget_the_oldest()
            if not future.done():
                return None
            del self._asked[key]
        return future.result()

    def _answer(self, answer: Callable[[Any], Any], argument: Any) -> Any:
        mine, its = Pipe()
        arguments = [sys.executable, "-c", _CODE, str(its.fileno())]
        # The child has its own process group, so that Ctrl-C in the dashboard's terminal does not reach it.
        # The child exits when the connection ends.
        with mine, its, subprocess.Popen(arguments, pass_fds=[its.fileno()], process_group=0) as process:
            self.process = process
            its.close()
            try:
                mine.send(sys.path)
                mine.send((answer, argument))
                is_answer, value = mine.recv()
            except (EOFError, ConnectionError):
                raise RuntimeError(
                    f"the process that computes {answer.__name__} ended with {process.wait()} and no answer; look for its "
                    "last lines in the terminal of the dashboard, and whether the kernel was out of memory"
                ) from None
            finally:
                mine.close()
                self.process = None
        if is_answer:
            return value
        raise value

    def _forget_the_oldest(self) -> None:
        done = [key for key, future in self._asked.items() if future.done()]
        for key in done[: max(0, len(self._asked) - _MOST_WAITING)]:
            del self._asked[key]


def answer_question(connection: Connection) -> None:
    """Read a question from ``connection``, and send back its answer or the exception."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    try:
        answer, argument = connection.recv()
        threading.Thread(target=_exit_with_dashboard, args=[connection], daemon=True).start()
        connection.send((True, answer(argument)))
    except Exception as error:
        connection.send((False, error))
    os._exit(0)


def _exit_with_dashboard(connection: Connection) -> None:
    """Exit when the dashboard exits or is killed, which ends the connection."""
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(0)


background: Final = Background()
