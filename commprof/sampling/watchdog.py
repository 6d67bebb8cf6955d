"""Detects a hung job from the files that its ranks write, and takes a dump. It never ends a process."""

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
    """Tracks how long nothing has changed, and whether that was reported. Pure.

    Args:
        seconds: time without progress before a check, and between checks.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: Fingerprints = {}
        self._next_look = 0.0
        self.reported = False

    def is_long(self, files: Fingerprints, now: float) -> bool:
        """Whether a check is due: nothing has changed for long enough, and that was not reported yet.

        Args:
            files: the fingerprints of the files of the ranks now; empty: nothing is recorded yet, which never counts.
            now: in seconds.
        """
        if files != self._seen:
            self._seen, self._next_look, self.reported = dict(files), now + self._seconds, False
        if not files or self.reported or now < self._next_look:
            return False
        self._next_look = now + self._seconds
        return True


class RunningTime:
    """Seconds that have passed while this process ran. Pure.

    A job that was suspended (Ctrl-Z, a batch system, a paused container) made no progress meanwhile, and neither did its
    watchdog. That time must not count.

    Args:
        longest: the longest time between two calls that counts.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._asked: float | None = None
        self._passed = 0.0

    def at(self, now: float) -> float:
        """The running time in seconds from the first call until ``now``."""
        if self._asked is not None:
            self._passed += min(now - self._asked, self._longest)
        self._asked = now
        return self._passed


class Watchdog:
    """Checks the ranks' files at intervals, in a thread of this process.

    If no rank has issued or completed a call for ``seconds`` while a rank waits for another, it takes a dump into the run
    and reports its first sentence, once until the next progress.

    A context manager. Its errors never reach the job.

    Args:
        say: called with one line for the person at the terminal.
        take: takes a dump: :func:`take_dump`.
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
                continue  # a directory that is being made, moved or finalised
            except Exception as error:  # after any error the job continues without a watchdog
                self._say(f"watchdog: it has stopped: {type(error).__name__}: {error}")
                return

    def _look(self) -> None:
        """Take the dump if some rank waits. Otherwise no process is disturbed: a long computation is no hang."""
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
