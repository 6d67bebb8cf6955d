"""Reads the interface counters of the machine in the launcher while a job runs."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Final

INTERVAL_SECONDS: Final = 0.5


class WireSampler:
    """Appends the counters of all interfaces to ``file`` at the start, at intervals and at the end.

    The last reading includes the bytes in the queues of TCP, because a slow link may send bytes after the ranks have
    exited. If the counters cannot be read or the file cannot be written, only the sampling stops. This class is a
    context manager.
    """

    def __init__(self, file: Path, counters: Any, interval_seconds: float = INTERVAL_SECONDS) -> None:
        # ``counters`` is any object whose read(queued=...) returns rows of schema.WIRE.
        self._path = file
        self._counters = counters
        self._interval_seconds = interval_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commprof-wire", daemon=True)

    def __enter__(self) -> WireSampler:
        if self._sample():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
            self._sample(is_last=True)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            if not self._sample():
                return

    def _sample(self, is_last: bool = False) -> bool:
        try:
            lines = "".join(json.dumps(row) + "\n" for row in self._counters.read(queued=is_last))
            # Finalizing the run removes the file and its directory, so the directory may be missing.
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(lines)
        except Exception:  # the counters are optional: an error must not stop the training
            return False
        return True
