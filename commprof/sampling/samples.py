"""The protocol of samplers, and the thread in the launcher that writes their samples."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol

from commprof.trace.directory import SAMPLES_NAME

INTERVAL_SECONDS: Final = 1.0


class Sample(NamedTuple):
    """One sampled value. The name of the value ends with its unit, such as bytes, percent or watts."""

    source: str
    device: str | None
    name: str
    value: float
    time_ns: int


class Sampler(Protocol):
    """A source of samples that is read at intervals. A failed reading returns no samples."""

    def read(self) -> Sequence[Sample]:
        """Return the current samples."""

    def close(self) -> None:
        """Close the resources of the sampler."""


class SampleWriter:
    """Reads samplers at intervals, in a thread of this process, and appends their samples to the run.

    This class is a context manager. If the file cannot be written, only the sampling ends.

    Args:
        run: The run directory.
        samplers: The samplers to read.
        seconds: The sampling interval in seconds.
        file: The name of the file in the run: ``samples.jsonl``, or a similar name for another host.
    """

    def __init__(
        self, run: Path, samplers: Sequence[Sampler], seconds: float, file: str = SAMPLES_NAME
    ) -> None:
        self._path = run / file
        self._samplers = samplers
        self._seconds = seconds
        self._host = socket.gethostname()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commprof-samples", daemon=True)

    def __enter__(self) -> SampleWriter:
        if self._samplers:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for sampler in self._samplers:
            sampler.close()

    def _run(self) -> None:
        while self._write() and not self._stop.wait(self._seconds):
            pass

    def _write(self) -> bool:
        try:
            rows = [self._row(sample) for sampler in self._samplers for sample in sampler.read()]
            if not rows:
                return True
            text = "".join(json.dumps(row) + "\n" for row in rows).encode()
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                return os.write(descriptor, text) == len(text)
            finally:
                os.close(descriptor)
        except Exception:  # samples are optional, so no error may end the training
            return False

    def _row(self, sample: Sample) -> dict[str, Any]:
        return {"host": self._host, **sample._asdict()}
