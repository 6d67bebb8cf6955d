"""Builds the tables ``steps`` and ``outside_steps`` of one rank, and determines the step of each record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from commprof.schema import PHASES, Phase, after_end
from commprof.trace.rank_files.events import Events
from commprof.trace.rank_files.step_boundaries import Course, Gap, LastEnd, Span, course_of, is_time

_NO_STEP: Final = -1
_UNKNOWN: Final = -(1 << 31)  # represents null in after_step
_FURTHEST: Final = (1 << 63) - 1
_OUTSIDE: Final = frozenset({Phase.EVALUATION, Phase.CHECKPOINT})
_OUTSIDE_NUMBERS: Final = tuple(PHASES.index(phase) for phase in sorted(_OUTSIDE))
_OTHER: Final = PHASES.index(Phase.OTHER)

_Array = np.ndarray[Any, Any]


class Placed(NamedTuple):
    """The step and phase of each record. Outside all steps, the step is -1 and ``after`` is the step before."""

    step: _Array
    after: _Array
    is_outside: _Array
    phase: _Array


class _Window(NamedTuple):
    """An interval of issue times [start, stop) in ns whose records belong to ``step``, whatever step they name."""

    start: int
    stop: int
    step: int
    after: int
    phases: tuple[tuple[int, int], ...]  # begin and number of each phase, for records that name no phase


@dataclass(frozen=True, slots=True)
class StepTable:
    """The rows of ``steps`` and ``outside_steps`` of one rank.

    Attributes:
        rows: The rows of ``steps``.
        outside_rows: The rows of ``outside_steps``.
        void: Step numbers that turned out not to be steps, each with the step that replaces it (-1 for none).
        outside: The phase (evaluation or checkpoint) of this rank, by the step that it followed.
    """

    rows: list[dict[str, Any]]
    outside_rows: list[dict[str, Any]]
    void: dict[int, int]
    outside: dict[int, str]
    _windows: list[_Window]
    # A number in records that is not a step -> the step that the records belong to, or -1.
    _following: dict[int, int]
    # Recorded step and phase of a record outside all steps -> the step before the record.
    _after_of: dict[tuple[int, str], int | None]

    def place(self, steps: _Array, issue_ns: _Array, phases: _Array) -> Placed:
        """Return the step and phase of each record from its recorded step, issue time in ns and phase."""
        step, phase = self._relabel(steps), phases.copy()
        after, is_outside = np.full(len(step), _UNKNOWN, np.int32), np.zeros(len(step), bool)
        if self._windows and len(step):
            start, stop, of_window, after_window = np.array(
                [window[:4] for window in self._windows], np.int64
            ).T
            window_index = np.searchsorted(start, issue_ns, "right") - 1
            mine = (window_index >= 0) & (issue_ns < stop[window_index])
            window_index = window_index[mine]
            step[mine], after[mine], is_outside[mine] = (
                of_window[window_index],
                after_window[window_index],
                of_window[window_index] < 0,
            )
            unnamed = np.flatnonzero(mine & (phases == _OTHER))
            phase[unnamed] = self._phases_at(issue_ns[unnamed])
        within = np.isin(phases, _OUTSIDE_NUMBERS) & (step != _NO_STEP)
        after[within], is_outside[within], step[within] = step[within], True, _NO_STEP
        return Placed(step, after, is_outside & (after != _UNKNOWN), phase)

    def _phases_at(self, times: _Array) -> _Array:
        """Return the phase at each of ``times`` in ns, for collectives that name no phase."""
        changes = [
            change
            for window in self._windows
            for change in (*(window.phases or ((window.start, _OTHER),)), (window.stop, _OTHER))
        ]
        at, named = np.array(changes, np.int64).T
        phases: _Array = named[np.searchsorted(at, times, "right") - 1]
        return phases

    def place_sum(self, step: int, phase: str) -> tuple[int, int | None]:
        """Return the step of a sum over records of one recorded step and phase, and the step before if it is outside.

        Outside all steps, the step is -1. Sums have no times, so a sum of an evaluation or checkpoint is assigned to
        the first one that began in the same recorded step.
        """
        if phase in _OUTSIDE:
            return _NO_STEP, self._after_of.get((step, phase), self._before(step, step))
        placed = self.void.get(step, step)
        placed = self._following.get(placed, placed)
        return placed, self._before(step, step - 1) if placed == _NO_STEP else None

    def _before(self, recorded: int, last: int) -> int | None:
        """Return the last step that is not after ``last``, or None.

        If ``recorded`` encodes a time after the end of a step, this step is used instead of ``last``.
        """
        last = after_end(recorded) if recorded < _NO_STEP else last
        return max((row["step"] for row in self.rows if row["step"] <= last), default=None)

    def _relabel(self, steps: _Array) -> _Array:
        """Return the step of each record, where numbers that are not steps are replaced."""
        instead = self.void | self._following
        if not instead or not len(steps):
            return steps.copy()
        none = np.array(sorted(instead), np.int32)
        index = np.searchsorted(none, steps)
        index[index == len(none)] = 0
        new = np.array([instead[step] for step in none.tolist()], np.int32)
        relabelled: _Array = np.where(none[index] == steps, new[index], steps)
        return relabelled


def build_steps(events: Events, elsewhere: Mapping[int, str], last_end: LastEnd) -> StepTable:
    """Return the table of the steps that the events of one rank describe.

    See :func:`commprof.trace.rank_files.step_boundaries.course_of` for the arguments.
    """
    course = course_of(events, elsewhere, last_end)
    micro = _micro_steps(events.rows["step"])
    metrics = _metrics(events.rows["metrics"], course.void)
    rows = []
    for span, before in zip(course.spans, [None, *course.spans], strict=False):
        last, first = span.last or {}, span.begin
        if before is not None and before.ends and before.ends[-1]["time_ns"] == span.begin_ns:
            first = before.ends[-1]
        rows.append(
            {
                "step": span.step,
                "begin_ns": span.begin_ns,
                "end_ns": span.end_ns,
                "outside_ns": span.outside_ns,
                "micro_steps": micro.get(span.step, 1),
                **metrics.get(span.step, {}),
                "rss_bytes": last.get("rss_bytes"),
                "device_bytes": last.get("device_bytes"),
                "cpu_ns": _difference(first.get("cpu_ns"), last.get("cpu_ns")),
            }
        )
    outside = {gap.after: gap.passes[0].phase for gap in course.gaps if gap.passes and gap.after is not None}
    return StepTable(
        rows,
        _outside_rows(course),
        course.void,
        outside,
        _windows(course),
        _following(course.spans),
        _after_of(course, events),
    )


def _after_of(course: Course, events: Events) -> dict[tuple[int, str], int | None]:
    """Return the step before the first evaluation and checkpoint of each recorded step, by recorded step and phase."""
    rows_by_time = {row["time_ns"]: row for row in events.rows["step"] if is_time(row.get("time_ns"))}
    times = np.array(sorted(rows_by_time), np.int64)
    last_steps: dict[tuple[int, str], int | None] = {}
    for each in course.passes:
        place = int(np.searchsorted(times, each.begin_ns, "right")) - 1
        recorded = _NO_STEP if place < 0 else _recorded_after(rows_by_time[int(times[place])])
        gap = next((gap for gap in course.gaps if each in gap.passes), None)
        begun = (span.step for span in course.spans if span.begin_ns <= each.begin_ns)
        after = max(begun, default=None) if gap is None else gap.after
        last_steps.setdefault((recorded, each.phase), after)
    return last_steps


def _recorded_after(row: Mapping[str, Any]) -> int:
    """Return the step that the recorder writes into the records between ``row`` and the next row."""
    step = row.get("step")
    if type(step) is not int:
        return _NO_STEP
    if row.get("ended") is not True:
        return step
    return step + 1 if row.get("is_told") else after_end(step)


def _windows(course: Course) -> list[_Window]:
    windows = []
    for span in course.spans:
        if len(span.ends) > 1:
            first, last = span.ends[0]["time_ns"], span.ends[-1]["time_ns"]
            windows.append(_Window(first, last, span.step, _UNKNOWN, ()))
    for gap in course.gaps:
        if gap.phase is None and gap.after is not None and gap.next_step == gap.after + 1:
            continue  # The records already name the next step.
        stop = _FURTHEST if gap.stop_ns is None else gap.stop_ns
        after = _UNKNOWN if gap.after is None else gap.after
        is_outside = gap.phase is not None or gap.next_step is None
        step = _NO_STEP if is_outside or gap.next_step is None else gap.next_step
        windows.append(_Window(gap.start_ns, stop, step, after, _phases(gap)))
    return sorted(windows)


def _phases(gap: Gap) -> tuple[tuple[int, int], ...]:
    """Return the begin in ns and the number of each phase in ``gap``, for collectives that name no phase."""
    if gap.phase is None:
        return ()
    first = (gap.start_ns, PHASES.index(gap.phase))
    return (first, *((each.begin_ns, PHASES.index(each.phase)) for each in gap.passes))


def _following(spans: list[Span]) -> dict[int, int]:
    """Return the correct step by the step number that records name after the end of a step."""
    begun = {span.step for span in spans}
    following = {}
    for span, after in zip(spans, [*spans[1:], None], strict=False):
        if span.ends:
            if span.step + 1 not in begun:
                following[span.step + 1] = _NO_STEP if after is None else after.step
            following[after_end(span.step)] = _NO_STEP if after is None else span.step
    return following


def _outside_rows(course: Course) -> list[dict[str, Any]]:
    rows = []
    told_begins: set[int] = set()
    for gap in course.gaps:
        if gap.phase is None and gap.next_step is not None:
            continue
        begin = gap.start_ns
        ends = [*(each.begin_ns for each in gap.passes[1:]), gap.end_ns]
        for each, end in zip(gap.passes, ends, strict=False):
            told_begins.add(each.begin_ns)
            rows.append(_outside_row(each.phase, gap.after, begin, end, each.passes))
            begin = begin if end is None else end
        if gap.phase is not None and not gap.passes and gap.end_ns is not None and gap.end_ns > begin:
            # Only another rank evaluated or saved in this time.
            rows.append(_outside_row(gap.phase, gap.after, begin, gap.end_ns, 0))
            begin = gap.end_ns
        if gap.next_step is None and (not rows or rows[-1]["end_ns"] is not None or not gap.passes):
            rows.append(_outside_row(Phase.OTHER, gap.after, begin, course.ended_ns, 0))
    steps = course.spans
    for each in course.passes:  # within a step, or before the first
        if each.begin_ns not in told_begins:
            after = max((span.step for span in steps if span.begin_ns <= each.begin_ns), default=None)
            rows.append(_outside_row(each.phase, after, each.begin_ns, each.end_ns, each.passes))
    return sorted(rows, key=lambda row: int(row["begin_ns"]))


def _outside_row(phase: str, after: int | None, begin: int, end: int | None, passes: int) -> dict[str, Any]:
    return {
        "phase": str(phase),
        "after_step": after,
        "begin_ns": begin,
        "end_ns": end,
        "passes": passes,
    }


def _micro_steps(boundaries: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    micro: dict[int, int] = {}
    for row in boundaries:
        number, step = row.get("micro_step", 0), row.get("step")
        if type(step) is int and isinstance(number, int):
            micro[step] = max(micro.get(step, 1), number + 1)
    return micro


def _difference(begin: Any, end: Any) -> int | None:
    return end - begin if isinstance(begin, int) and isinstance(end, int) else None


def _metrics(rows: Iterable[Mapping[str, Any]], void: Mapping[int, int]) -> dict[int, dict[str, float]]:
    """Return the metrics of each step: the last value of loss, grad_norm and loss_scale, and the sum of samples."""
    metrics: dict[int, dict[str, float]] = {}
    for row in rows:
        name, step = row.get("name"), row.get("step")
        if not isinstance(step, int):
            continue
        try:
            value = float(row.get("value", math.nan))
        except (TypeError, ValueError, OverflowError):
            continue
        values = metrics.setdefault(void.get(step, step), {})
        if name in ("loss", "grad_norm", "loss_scale"):
            values[name] = value
        elif name == "samples":
            values[name] = values.get(name, 0.0) + value
    return metrics
