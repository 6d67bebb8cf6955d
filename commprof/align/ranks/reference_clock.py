"""Convert the times of every process to one clock, the clock of rank 0's host, by measured offsets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commprof.align.sequences.group_ids import numbered

# Assumptions about two clocks, as fractions of the time that passes.
WANDER: Final = 2e-6  # between two measurements, their rates differ from the mean rate by less than this
DRIFT_LIMIT: Final = 100e-6  # without other knowledge, they drift by less than this
JUMP: Final = 1e-3  # a larger change is not drift: a machine was suspended or moved

Times = npt.NDArray[np.int64]
Process = tuple[int, int, int]  # rank, attempt, pid


class Measured(NamedTuple):
    """Offsets and their errors, in ns."""

    offset_ns: Times
    error_ns: Times


class Readings(NamedTuple):
    """The clock of each row.

    It contains a number for the clock, and the offset of the clock to the reference with its error in ns, if
    the offset is known.
    """

    clock: Times
    offset_ns: Times
    error_ns: Times
    known: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class OffsetCurve:
    """The offset of one clock to the reference over time, through at least one measurement, in order.

    ``wander`` is :data:`WANDER` or the result of :func:`observed_wander`, whichever is larger.

    Between two measurements ``(a, offset_a +- error_a)`` and ``(b, offset_b +- error_b)``, with w = (t - a) / (b - a)::

        offset(t) = (1 - w) offset_a + w offset_b
        error(t)  = (1 - w) error_a + w error_b + wander min(t - a, b - t)

    Before the first and after the last measurement, at distance d, with the drift between these two measurements::

        offset(t) = offset_end + drift d
        error(t)  = error_end + (wander + (error_first + error_last) / (last - first)) d

    If this bound is worse or if there is only one measurement, drift is 0, and DRIFT_LIMIT replaces the bracket.
    If two neighbors differ by more than JUMP allows, the offset between them is one of the two offsets. The curve is
    then the middle of the two, with an error that includes both.
    """

    times: Times
    offsets: Times
    errors: Times
    wander: float = WANDER

    def at(self, times: Times) -> Measured:
        """Return the offset at each of ``times`` (ns, on the clock itself)."""
        after = np.searchsorted(self.times, times, side="right")
        inside = (after > 0) & (after < len(self.times))
        offset, error = self._beyond(times)
        if inside.any():
            offset[inside], error[inside] = self._between(times[inside], after[inside])
        return Measured(np.rint(offset).astype(np.int64), np.ceil(error).astype(np.int64))

    def _between(self, times: Times, after: Times) -> tuple[Any, Any]:
        a, b = after - 1, after
        length = (self.times[b] - self.times[a]).astype(np.float64)
        since, left = times - self.times[a], self.times[b] - times
        weight = since / length
        step = self.offsets[b] - self.offsets[a]
        offset = self.offsets[a] + weight * step
        error = (
            (1 - weight) * self.errors[a] + weight * self.errors[b] + self.wander * np.minimum(since, left)
        )
        jumped = np.abs(step) > JUMP * length + self.errors[a] + self.errors[b]
        worst = np.abs(step) / 2 + np.maximum(self.errors[a], self.errors[b])
        return (
            np.where(jumped, self.offsets[a] + step / 2, offset),
            np.where(jumped, worst, error),
        )

    def _beyond(self, times: Times) -> tuple[Any, Any]:
        drift, doubt = self._drift()
        end = np.where(times < self.times[0], 0, len(self.times) - 1)
        distance = (times - self.times[end]).astype(np.float64)
        return self.offsets[end] + drift * distance, self.errors[end] + doubt * np.abs(distance)

    def _drift(self) -> tuple[float, float]:
        """Return the drift over all measurements, and its possible error."""
        length = float(self.times[-1] - self.times[0])
        if length <= 0:
            return 0.0, DRIFT_LIMIT
        drift = float(self.offsets[-1] - self.offsets[0]) / length
        doubt = self.wander + float(self.errors[0] + self.errors[-1]) / length
        return (drift, doubt) if doubt < DRIFT_LIMIT and abs(drift) < JUMP else (0.0, DRIFT_LIMIT)


class ReferenceClock:
    """Converts the clock of each process to the reference clock of its attempt.

    Args:
        clocks: Rows of the ``clocks`` table, which contain the clock of each process.
        offsets: Rows of the ``clock_offsets`` table.
        one_host: Whether processes without a recorded clock share one clock. Otherwise each has a separate
            clock.
    """

    def __init__(
        self, clocks: Iterable[Mapping[str, Any]], offsets: Iterable[Mapping[str, Any]], one_host: bool
    ) -> None:
        self._one_host = one_host
        self._clock_of: dict[Process, str] = {}
        for row in clocks:
            self._clock_of[_process(row)] = row["clock"] or row["host"]
        self._reference: dict[int, str] = {}  # the reference clock by attempt
        measured: dict[tuple[int, str], dict[int, tuple[int, int]]] = {}
        for row in offsets:
            clock, attempt = self.clock_of(_process(row)), row["attempt"]
            if row["rank"] == row["reference_rank"]:
                self._reference[attempt] = clock
            points = measured.setdefault((attempt, clock), {})
            points[row["time_ns"]] = (row["offset_ns"], row["error_ns"])
        self._curves = {key: _curve(points) for key, points in measured.items()}

    def clock_of(self, process: Process) -> str:
        """Return the clock that ``process`` reads."""
        unknown = "" if self._one_host else f"process {process}"
        return self._clock_of.get(process, unknown)

    def offset(self, process: Process, times: Times) -> Measured | None:
        """Return the offset that converts ``times`` of ``process`` to the reference clock.

        The result is None if the offset is not known.
        """
        if self._is_reference(process):
            zero = np.zeros(len(times), np.int64)
            return Measured(zero, zero)
        curve = self._curves.get((process[1], self.clock_of(process)))
        return None if curve is None else curve.at(times)

    def readings(self, rows: pa.Table) -> Readings:
        """Return the clock of each of ``rows``, and its offset at the time of issue.

        Args:
            rows: Records with the columns rank, attempt, pid and issue_ns.
        """
        count = len(rows)
        readings = Readings(
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.ones(count, bool),
        )
        times = rows["issue_ns"].to_numpy()
        codes, first = numbered(rows.select(["rank", "attempt", "pid"]))
        processes = [
            _process(row) for row in rows.select(["rank", "attempt", "pid"]).take(pa.array(first)).to_pylist()
        ]
        numbers: dict[str, int] = {}
        clocks = [numbers.setdefault(self.clock_of(process), len(numbers)) for process in processes]
        readings.clock[:] = np.array(clocks, np.int64)[codes]
        for code, process in enumerate(processes):
            if self._is_reference(process):
                continue
            mine = np.flatnonzero(codes == code)
            measured = self.offset(process, times[mine])
            if measured is None:
                readings.known[mine] = False
            else:
                readings.offset_ns[mine], readings.error_ns[mine] = measured
        return readings

    def _is_reference(self, process: Process) -> bool:
        return self.clock_of(process) == self._reference.get(process[1])


def _process(row: Mapping[str, Any]) -> Process:
    return row["rank"], row["attempt"], row["pid"]


def observed_wander(times: Times, offsets: Times, errors: Times) -> float:
    """Return the largest certain distance of a measurement from the line between its neighbors, as a rate.

    The distance is divided by the time to the nearer neighbor. Rates of JUMP or more are ignored. If a clock
    daemon corrects a large error, this value grows and then widens the bound everywhere.
    """
    if len(times) < 3:
        return 0.0
    since, left = (times[1:-1] - times[:-2]).astype(np.float64), (times[2:] - times[1:-1]).astype(np.float64)
    weight = since / (since + left)
    line = offsets[:-2] + weight * (offsets[2:] - offsets[:-2])
    slack = (1 - weight) * errors[:-2] + weight * errors[2:] + errors[1:-1]
    rate = (np.abs(offsets[1:-1] - line) - slack) / np.minimum(since, left)
    return float(rate[rate < JUMP].max(initial=0.0))


def _curve(points: Mapping[int, tuple[int, int]]) -> OffsetCurve:
    in_order = sorted(points)
    times = np.array(in_order, np.int64)
    offsets, errors = (np.array([points[time][part] for time in in_order], np.int64) for part in range(2))
    return OffsetCurve(times, offsets, errors, max(WANDER, observed_wander(times, offsets, errors)))
