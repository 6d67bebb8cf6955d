"""Writes the begin and end of evaluations and checkpoints, which are inferred from the phases."""

from __future__ import annotations

import time
from typing import Final

from commprof.recorder.process.journal import Journal
from commprof.schema import Phase

OUTSIDE: Final = frozenset({Phase.EVALUATION, Phase.CHECKPOINT})
TRAINING: Final = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER})


class OutsideSteps:
    """Writes one line when an evaluation or a checkpoint begins, and a second line when it has ended.

    An evaluation has many forward passes. It begins with its first pass, and ends with the last pass before training
    continues or before a checkpoint begins.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._phase: str | None = None
        self._begin_ns = 0
        self._end_ns = 0  # the end of the last pass; 0 within a pass
        self._passes = 0

    def hear(self, phase: str, has_trained: bool) -> None:
        """Handle a change of the phase.

        Args:
            phase: The new phase.
            has_trained: Whether the latest step has had a training phase.
        """
        if phase in OUTSIDE:
            self._enter(phase, has_trained)
        elif self._phase is not None:
            now = time.perf_counter_ns()
            self._end_ns = self._end_ns or now
            if phase in TRAINING:
                self._close(now)

    def finish(self) -> None:
        """Write the end of an open evaluation or checkpoint when recording ends."""
        if self._phase is not None:
            self._end_ns = self._end_ns or time.perf_counter_ns()
            self._close(None)

    def _enter(self, phase: str, has_trained: bool) -> None:
        if phase == self._phase:
            self._passes += self._end_ns != 0
            self._end_ns = 0
            return
        now = time.perf_counter_ns()
        if self._phase is not None:
            self._end_ns = self._end_ns or now
            self._close(None)
        self._phase, self._begin_ns, self._end_ns, self._passes = phase, now, 0, 1
        self._journal.write(
            "outside_step", {"phase": str(phase), "begin_ns": now, "has_trained": has_trained}
        )

    def _close(self, resume_ns: int | None) -> None:
        row = {"phase": str(self._phase), "begin_ns": self._begin_ns, "end_ns": self._end_ns}
        self._phase = None
        self._journal.write("outside_step", {**row, "resume_ns": resume_ns, "passes": self._passes})
