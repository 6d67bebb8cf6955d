"""Writes step boundaries with the process's resources, and the rows that a program publishes about itself."""

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
    """Writes a row at each step boundary, and the rows that a program publishes about itself.

    Args:
        journal: The journal that receives the rows.
        check: A function that is called at each boundary before the new step begins.
    """

    def __init__(self, journal: Journal, check: Callable[[], None]) -> None:
        self.journal = journal
        self.cost_ns = 0
        self.readings: HostReadings | None = None  # the readings of the host's interface counters
        self._check = check
        self._buckets = BucketRows(journal)
        self._next_clock_ns = 0
        self._explicit = False
        self._automatic_call = False
        self._is_automatic = False  # whether the last boundary was inferred, not reported by the program
        self._starting = False
        self._outside = OutsideSteps(journal)
        self._phase = hooks.position.phase
        self._has_trained = False  # whether a training phase was reported in this step
        self._may_have_ended = False
        self._end_is_told = False  # whether the runtime reports the ends of steps, so that none is inferred
        # The row of the step in which recording began. It is written when this step has ended.
        self._pending_row: dict[str, Any] | None = None

    def explicit(self) -> bool:
        """Return whether the program reports its steps itself."""
        return self._explicit

    def start(self, is_recorded: bool = True) -> None:
        """Write the current position of the training after the files were opened, if this position is recorded."""
        self._write_clock(time.perf_counter_ns())
        if is_recorded and hooks.position.step >= 0:
            begin = self.begin_automatic if self._is_automatic else self.begin
            self._starting = True
            begin(hooks.position.step, hooks.position.micro_step)
            self._starting = False

    def begin(self, step: int, micro_step: int) -> None:
        """Begin step ``step``, or a further micro-batch of this step."""
        now = time.perf_counter_ns()
        self._hear()
        self._buckets.write()
        if micro_step == 0:
            self._check()
            if self.readings is not None:
                self.readings.begin(step, now)
            self._has_trained = False
            # A phase that is still active belongs to the previous step, so the end of this phase ends no step.
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
        """Handle a change of the phase.

        If the program reports only the begins of steps, the end of an optimizer phase may be the end of the step.
        """
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
        """End the step. Later collectives belong to the next step. The last call before the next step counts.

        Args:
            is_told: Whether the end was reported. Otherwise it is inferred from the end of an optimizer phase, and the
                step may last until the begin of the next step.
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
        """End the step, as reported by the program's runtime."""
        self._end_is_told = True
        self.end()

    def go_back(self) -> None:
        """Return to initialization, because the program prepares another training, of which no step has begun."""
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
        """Begin a step that is not recorded."""
        self._hear()
        self._write_pending_row()
        self.journal.move(step, micro_step)

    def close(self) -> None:
        """Write the end of the last step that is recorded."""
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
        """Write the resources at the end of the last step, and the clocks, when recording ends."""
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
        """Write one published row with the current step and time."""
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
        """Register a flush of ``bucket`` with the step and the time. The row is written when the next step begins."""
        now = time.perf_counter_ns()
        self._buckets.add(bucket, hooks.position.step, hooks.position.micro_step, now)
        self.cost_ns += time.perf_counter_ns() - now

    def _write_clock(self, now: int) -> None:
        self._next_clock_ns = now + _CLOCK_INTERVAL_NS
        self.journal.write("clock", {**read_clocks()._asdict(), "clock": clock_identity()})

    def begin_automatic(self, step: int, micro_step: int) -> None:
        """Begin step ``step``, or a further micro-batch of this step, which was inferred, not reported."""
        try:
            self._automatic_call = True
            hooks.step(step, micro_step)
        except Exception as error:
            self.journal.fault(error)
        finally:
            self._automatic_call = False


def _resources() -> dict[str, int | None]:
    """Return the current resident memory (bytes), memory allocated on the device (bytes), and CPU time (ns)."""
    rss = None
    try:
        # This runs once per step, and is four times as fast as a file object.
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            rss = int(os.read(descriptor, 128).split()[1]) * _PAGE
        finally:
            os.close(descriptor)
    except (OSError, ValueError, IndexError) as error:
        pass_on(error)
    return {"rss_bytes": rss, "device_bytes": _device_bytes(), "cpu_ns": time.process_time_ns()}


def _device_bytes() -> int | None:
    """Return the bytes that tensors occupy on the current device; None if no device is used.

    torch.cuda.memory_allocated is not used. It takes 0.5 ms, because it flattens and sorts all statistics first.
    """
    if not torch.cuda.is_initialized():
        return None
    statistics = torch.cuda.memory_stats_as_nested_dict()
    return int(statistics["allocated_bytes"]["all"]["current"]) if statistics else 0
