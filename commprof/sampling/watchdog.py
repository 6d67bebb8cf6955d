"""Notices that a job hangs, from the files that its ranks write, and has a dump made of it. Never ends anything."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from commprof.errors import CommprofError
from commprof.sampling.dump import Dump, keep_dump, take_dump
from commprof.sampling.dump_text import dump_text
from commprof.sampling.live import fingerprint, latest_files
from commprof.trace.directory import DUMPS_DIRECTORY
from commprof.trace.rank_files.layout import RankFile

_LOOKS_PER_PERIOD: Final = 4
_LONGEST_PAUSE: Final = 5.0
_SHORTEST_PAUSE: Final = 0.1

Fingerprints = dict[RankFile, tuple[int, int]]


class Stillness:
    """How long nothing has changed, and whether that was reported. Pure.

    Args:
        seconds: stillness that is worth a look, and again after as long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: Fingerprints = {}
        self._next_look = 0.0
        self.reported = False

    def is_long(self, files: Fingerprints, now: float) -> bool:
        """Whether it is time for a look: nothing has changed for long enough, and it was not reported since it last did.

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

    A job that was stopped (Ctrl-Z, a batch system's suspend, a container's pause) has not moved for long when it goes on,
    and its watchdog stood still as long: that says nothing.

    Args:
        longest: of what passes between two questions, no more counts.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._asked: float | None = None
        self._passed = 0.0

    def at(self, now: float) -> float:
        """What has passed until ``now``, in seconds, since the first question."""
        if self._asked is not None:
            self._passed += min(now - self._asked, self._longest)
        self._asked = now
        return self._passed


class Watchdog:
    """Looks at the ranks' files at intervals, in a thread of this process.

    When no rank has issued or completed anything for ``seconds`` while one of them waits for another, a dump is made into
    the run and its first sentence is said; once, until something moves again.

    A context manager. Nothing that goes wrong here reaches the job.

    Args:
        say: called with one line for the person at the terminal.
        take: makes a dump: :func:`take_dump`.
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
            except Exception as error:  # whatever it is, the job goes on without a watchdog
                self._say(f"watchdog: it has stopped watching: {type(error).__name__}: {error}")
                return

    def _look(self) -> None:
        """Make the dump if some rank waits. Without that, no process is disturbed: a long calculation is no hang."""
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
        self._say(f"watchdog: nothing has moved for {self._seconds:g} s: {dump.verdict.sentence}{where}")
