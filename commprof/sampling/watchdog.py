"""Detects a hung job from the files that its ranks write, and takes a dump. Never ends a process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from commprof.errors import CommprofError
from commprof.sampling.dump_text import dump_text
from commprof.sampling.job_dump import Dump, keep_dump, take_dump
from commprof.sampling.live import fingerprint, latest_files
from commprof.trace.directory import DUMPS_DIRECTORY
from commprof.trace.rank_files.layout import RankFile

_LOOKS_PER_PERIOD: Final = 4
_LONGEST_PAUSE: Final = 5.0
_SHORTEST_PAUSE: Final = 0.1

Fingerprints = dict[RankFile, tuple[int, int]]


class Stillness:
    """Tracks how long the files of the ranks have not changed, and whether this was reported. Pure.

    Args:
        seconds: The time in seconds without progress before a check, and between checks.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: Fingerprints = {}
        self._next_look = 0.0
        self.reported = False

    def is_long(self, files: Fingerprints, now: float) -> bool:
        """Return whether a check is due: no file has changed for long enough, and this was not reported yet.

        Args:
            files: The current fingerprints of the files of the ranks. If empty, nothing is recorded yet, and no check
                is due.
            now: The current running time in seconds.
        """
        if files != self._seen:
            self._seen, self._next_look, self.reported = dict(files), now + self._seconds, False
        if not files or self.reported or now < self._next_look:
            return False
        self._next_look = now + self._seconds
        return True


class RunningTime:
    """Counts the seconds in which this process ran. Pure.

    A job that is suspended (Ctrl-Z, a batch system, a paused container) makes no progress, and the watchdog is
    suspended with it. This time must not count as time without progress.

    Args:
        longest: The most seconds that count between two calls.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._asked: float | None = None
        self._passed = 0.0

    def at(self, now: float) -> float:
        """Return the running time in seconds from the first call until ``now``."""
        if self._asked is not None:
            self._passed += min(now - self._asked, self._longest)
        self._asked = now
        return self._passed


class Watchdog:
    """Checks the files of the ranks at intervals, in a thread of this process.

    The watchdog acts if a rank is blocked and no rank has issued or completed a call for ``seconds``. It then writes a
    dump into the run and reports the verdict, once until the next progress.

    This class is a context manager. Its errors never reach the job.

    Args:
        run: The run directory.
        seconds: The time in seconds without progress before a dump.
        say: The function that is called with one line of text for the user.
        take: The function that takes a dump. Default: :func:`take_dump`.
    """

    def __init__(
        self,
        run: Path,
        seconds: float,
        say: Callable[[str], None],
        take: Callable[..., Dump] = take_dump,
    ) -> None:
        self._run_path = run
        self._seconds = seconds
        self._say = say
        self._take = take
        self._stillness = Stillness(seconds)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="commprof-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        pause = min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, self._seconds / _LOOKS_PER_PERIOD))
        running = RunningTime(2 * pause)
        while not self._stop.wait(pause):
            try:
                now = running.at(time.monotonic())
                files = {identity: fingerprint(stem) for identity, stem in latest_files(self._run_path)}
                if self._stillness.is_long(files, now):
                    self._look()
            except (CommprofError, OSError):
                continue  # the directory is being created, moved or finalized
            except Exception as error:  # after any error the job continues without a watchdog
                self._say(f"watchdog: stopped after an error: {type(error).__name__}: {error}")
                return

    def _look(self) -> None:
        """Take the dump if a rank is blocked.

        The first check takes no stacks. So no process is disturbed during a long computation, which is not a hang.
        """
        if not self._take(self._run_path, stacks=False, watch_seconds=0.0).verdict.hangs:
            return
        dump = self._take(self._run_path)
        if not dump.verdict.hangs:
            return
        self._stillness.reported = True
        texts = [(".txt", dump_text(dump)), (".json", json.dumps(dump.as_dict(), indent=1) + "\n")]
        try:
            file = keep_dump(self._run_path / DUMPS_DIRECTORY, f"hang-{dump.taken:%Y%m%d-%H%M%S}", texts)
            where = f"; {file}"
        except OSError as error:
            where = f" (the dump could not be kept: {error.strerror})"
        self._say(f"watchdog: no progress for {self._seconds:g} s: {dump.verdict.sentence}{where}")
