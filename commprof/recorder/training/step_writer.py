"""Writes step boundaries with resources, and the rows that a program publishes about itself."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from commprof import hooks
from commprof.program_exceptions import pass_on
from commprof.recorder.clocks.process_clocks import clock_identity, read_clocks
from commprof.recorder.process.counters import HostReadings
from commprof.recorder.process.journal import Journal
from commprof.recorder.process.recorder_options import BEFORE_THE_FIRST
from commprof.recorder.training.outside_steps import TRAINING, OutsideSteps
from commprof.recorder.training.published_buckets import BucketRows
from commprof.schema import Phase, after_end

_CLOCK_INTERVAL_NS: Final = 60_000_000_000
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Steps:
    """Writes a row at each step boundary, and what a program publishes about itself.

    Args:
        check: run at each boundary before the new step begins.
    """

    def __init__(self, journal: Journal, check: Callable[[], None]) -> None:
        self.journal = journal
        self.cost_ns = 0
        self.readings: HostReadings | None = None  # of the host's counters
        self._check = check
        self._buckets = BucketRows(journal)
        self._next_clock_ns = 0
        self._explicit = False
        self._automatic_call = False
        self._is_automatic = False  # the last boundary was not named by the program
        self._starting = False
        self._outside = OutsideSteps(journal)
        self._phase = hooks.position.phase
        self._has_trained = False  # a phase of training was named in this step
        self._may_have_ended = False
        self._end_is_told = False  # by the program's runtime: nothing needs to be concluded
        # The row of the step in which recording began, until the step has ended.
        self._pending_row: dict[str, Any] | None = None

    def explicit(self) -> bool:
        """Whether the program names its steps itself."""
        return self._explicit

    def start(self, is_recorded: bool = True) -> None:
        """The files are open: write the current position of the training, if it is to be recorded."""
        self._write_clock(time.perf_counter_ns())
        if is_recorded and hooks.position.step >= 0:
            begin = self.begin_automatic if self._is_automatic else self.begin
            self._starting = True
            begin(hooks.position.step, hooks.position.micro_step)
            self._starting = False

    def begin(self, step: int, micro_step: int) -> None:
        """Step ``step`` begins, or a further micro step of it."""
        now = time.perf_counter_ns()
        self._hear()
        self._buckets.write()
        if micro_step == 0:
            self._check()
            if self.readings is not None:
                self.readings.begin(step, now)
            self._has_trained = False
            # A phase that is still in force is that of the step before: to leave it ends nothing.
            self._phase = ""
        self._may_have_ended = False
        self.journal.move(step, micro_step)
        row = {
            "step": step,
            "micro_step": micro_step,
            "time_ns": now,
            "automatic": self._automatic_call,
            **_resources(),
        }
        self._write_pending_row()
        if self._starting:
            self._pending_row = row
        else:
            self.journal.write("step", row)
        if now >= self._next_clock_ns:
            self._write_clock(now)
        self.cost_ns += time.perf_counter_ns() - now

    def hear_phase(self, phase: str) -> None:
        """The phase changes. Where only the steps' begins are named, an optimizer that has stepped may have ended one."""
        self._outside.hear(phase, self._has_trained)
        before, self._phase = self._phase, phase
        if phase in TRAINING:
            self._has_trained = True
            if self._may_have_ended:
                self._may_have_ended = False
                self.journal.move(hooks.position.step, hooks.position.micro_step)
        if before == Phase.OPTIMIZER != phase and self._explicit and not self._end_is_told:
            self.end(is_told=False)

    def end(self, is_told: bool = True) -> None:
        """The step has ended; what follows belongs to the next one. The last call before the next step counts.

        Args:
            is_told: else it is concluded from an optimizer's step, and the step may reach to the next one's begin.
        """
        now = time.perf_counter_ns()
        step = hooks.position.step
        if step == BEFORE_THE_FIRST:
            return
        self._write_pending_row()
        self.journal.write(
            "step", {"step": step, "ended": True, "is_told": is_told, "time_ns": now, **_resources()}
        )
        self._may_have_ended = not is_told
        if is_told:
            self.journal.end_step(step + 1)
        else:
            self.journal.move(after_end(step), 0)
        self.cost_ns += time.perf_counter_ns() - now

    def tell_end(self) -> None:
        """The program's runtime says that the step has ended."""
        self._end_is_told = True
        self.end()

    def go_back(self) -> None:
        """What comes is initialisation again: of a training of its own, where no step of this recording has begun."""
        self._pending_row = None
        self.journal.move(BEFORE_THE_FIRST, 0)
        if self.readings is not None:
            self.readings.go_back()

    def _write_pending_row(self) -> None:
        pending_row, self._pending_row = self._pending_row, None
        if pending_row is not None:
            self.journal.write("step", pending_row)

    def _hear(self) -> None:
        self._is_automatic = self._automatic_call
        if not self._automatic_call:
            self._explicit = True

    def pass_by(self, step: int, micro_step: int) -> None:
        """A step begins that is not to be recorded."""
        self._hear()
        self._write_pending_row()
        self.journal.move(step, micro_step)

    def close(self) -> None:
        """The last step that is to be recorded has ended."""
        self._outside.finish()
        if self.readings is not None:
            self.readings.end_steps()
        self._buckets.write()
        self._write_pending_row()
        now = time.perf_counter_ns()
        self.journal.write(
            "step", {"step": None, "micro_step": 0, "time_ns": now, "closed": True, **_resources()}
        )

    def finish(self) -> None:
        """Recording ends: the last step's resources and the clocks."""
        now = time.perf_counter_ns()
        self._outside.finish()
        self._buckets.write()
        self._write_pending_row()
        row = {"step": None, "micro_step": 0, "time_ns": now, "has_trained": self._has_trained}
        self.journal.write("step", {**row, **_resources()})
        self._write_clock(now)
        if self.readings is not None:
            self.readings.finish()

    def note_row(self, table: str, row: Mapping[str, Any]) -> None:
        """Write one published row, with the step and the time."""
        now = time.perf_counter_ns()
        content = dict(row)
        if table == "metrics":
            value = content.get("value")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                self.journal.refused_metrics += 1
                return
            content["value"] = float(value) if math.isfinite(value) else repr(float(value))
        moment = {"step": hooks.position.step, "micro_step": hooks.position.micro_step, "time_ns": now}
        self.journal.write(table, content | moment)
        self.cost_ns += time.perf_counter_ns() - now

    def note_flush(self, bucket: hooks.bucket) -> None:
        """Keep that ``bucket`` was flushed, with the step and the time; written when the next step begins."""
        now = time.perf_counter_ns()
        self._buckets.add(bucket, hooks.position.step, hooks.position.micro_step, now)
        self.cost_ns += time.perf_counter_ns() - now

    def _write_clock(self, now: int) -> None:
        self._next_clock_ns = now + _CLOCK_INTERVAL_NS
        self.journal.write("clock", {**read_clocks()._asdict(), "clock": clock_identity()})

    def begin_automatic(self, step: int, micro_step: int) -> None:
        """Step ``step`` begins, or a further micro step of it, though the program does not say so."""
        try:
            self._automatic_call = True
            hooks.step(step, micro_step)
        except Exception as error:
            self.journal.fault(error)
        finally:
            self._automatic_call = False


def _resources() -> dict[str, int | None]:
    """Resident memory, memory allocated on the device, and CPU time of the process, now."""
    rss = None
    try:
        # Four times as fast as a file object, and this is once a step.
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            rss = int(os.read(descriptor, 128).split()[1]) * _PAGE
        finally:
            os.close(descriptor)
    except (OSError, ValueError, IndexError) as error:
        pass_on(error)
    return {"rss_bytes": rss, "device_bytes": _device_bytes(), "cpu_ns": time.process_time_ns()}


def _device_bytes() -> int | None:
    """Bytes that tensors have on the current device; None: no device is used.

    Not torch.cuda.memory_allocated, which takes 0.5 ms, because it flattens and sorts all statistics first.
    """
    if not torch.cuda.is_initialized():
        return None
    statistics = torch.cuda.memory_stats_as_nested_dict()
    return int(statistics["allocated_bytes"]["all"]["current"]) if statistics else 0
